"""The process from which blocks are read, and code that both processes of a hand-over benchmark share."""

from __future__ import annotations

import multiprocessing
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kv_transfer.connector import Connector, WakeCallback
from kv_transfer.errors import PeerUnreachableError
from kv_transfer.factory import build_connector
from kv_transfer.layout import KVLayout, KVRegion, MemoryKind, group_layers
from kv_transfer.nixl.agent import NixlAgent
from kv_transfer.options import ConnectorOptions
from kv_transfer.params import Hello, KVTransferParams, PeerIdentity
from kv_transfer.transfer_options import TransportChoice

NUM_BLOCKS = 600
"""Blocks of each region; reads of up to 512 of them can be scattered."""

CALL_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """The blocks to move."""

    name: str
    layout: KVLayout


SHAPES = (
    BlockShape(
        name="32KiB",
        layout=KVLayout(
            model_hash="built-in",
            groups=group_layers([None] * 4),
            num_kv_heads=2,
            head_dim=64,
            block_size=16,
            dtype="bfloat16",
            bytes_per_element=2,
        ),
    ),
    BlockShape(
        name="2MiB",
        layout=KVLayout(
            model_hash="8B",
            groups=group_layers([None] * 32),
            num_kv_heads=8,
            head_dim=128,
            block_size=16,
            dtype="bfloat16",
            bytes_per_element=2,
        ),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedPrompt:
    """A prompt whose chunks take ``chunk_s`` each to compute: on a CPU of its own, or (``on_cpu`` False) on a GPU."""

    request_id: str
    chunks: tuple[tuple[int, ...], ...]
    chunk_s: float
    on_cpu: bool

    @property
    def block_ids(self) -> tuple[int, ...]:
        """All blocks in prompt order."""
        return tuple(block_id for chunk in self.chunks for block_id in chunk)


class Region:
    """Memory for ``NUM_BLOCKS`` blocks, of which every page has been touched."""

    def __init__(self, layout: KVLayout, *, fill: int) -> None:
        self.memory = np.full((NUM_BLOCKS, layout.block_bytes), fill, dtype=np.uint8)
        self.region = KVRegion(
            base_address=self.memory.ctypes.data,
            num_blocks=NUM_BLOCKS,
            block_bytes=layout.block_bytes,
            memory=MemoryKind.DRAM,
            device_index=0,
        )


class SourceProcess:
    """A process with a region, a connector that grants leases on it, and a bare NIXL agent. It also is a rendezvous."""

    def __init__(self, shape: BlockShape, *, transport: TransportChoice = "network") -> None:
        context = multiprocessing.get_context("spawn")
        self._lock = threading.Lock()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, shape, transport))
        self._process.start()
        theirs.close()

    def meet(self, engine_id: str, hello: Hello, *, timeout_s: float) -> Hello:  # noqa: ARG002  (the Protocol's)
        """Introduce a connector to the connector of this process."""
        answer: Hello = self._call("accept", hello, timeout_s=timeout_s)
        return answer

    def grant(self, block_ids: tuple[int, ...]) -> KVTransferParams:
        """Grant a lease on blocks."""
        params: KVTransferParams = self._call("grant", block_ids)
        return params

    def prefill(self, prompt: ChunkedPrompt) -> tuple[KVTransferParams, float]:
        """Compute a prompt chunk by chunk, announce each chunk, and lease the blocks. Also returns how long the
        computation took.
        """
        params, compute_s = self._call("prefill", prompt)
        return params, compute_s

    def raw(self) -> tuple[bytes, int]:
        """The metadata of the bare agent and the address of the region."""
        metadata, address = self._call("raw", None)
        return metadata, address

    def close(self) -> None:
        """End the process."""
        self._call("close", None)
        self._process.join(CALL_TIMEOUT_S)

    def _call(self, method: str, argument: object, *, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        with self._lock:
            self._pipe.send((method, argument))
            if not self._pipe.poll(timeout_s):
                raise PeerUnreachableError(engine_id="source", reason=f"no answer to {method} within {timeout_s:g} s")
            return self._pipe.recv()


def make_connector(
    name: str,
    region: Region,
    shape: BlockShape,
    rendezvous: SourceProcess | None,
    wake: WakeCallback,
    *,
    checksums: bool,
    transport: TransportChoice = "network",
) -> Connector:
    """A NIXL connector. Without a rendezvous it waits until the other side connects."""
    return build_connector(
        ConnectorOptions(connector="nixl", streamed=True, checksums=checksums, transport=transport),
        identity=PeerIdentity(engine_id=name, incarnation="1"),
        layout=shape.layout,
        region=region.region,
        rendezvous=rendezvous or _NobodyToMeet(),
        wake=wake,
    )


class _NobodyToMeet:
    def meet(self, engine_id: str, hello: Hello, *, timeout_s: float) -> Hello:  # noqa: ARG002  (the Protocol's)
        raise PeerUnreachableError(engine_id=engine_id, reason="this side waits for the other one to connect")


def make_agent(name: str, transport: TransportChoice) -> NixlAgent:
    """A bare NIXL agent."""
    return NixlAgent(name, memory=MemoryKind.DRAM, is_local=transport == "local")


def _serve(pipe: Connection, shape: BlockShape, transport: TransportChoice) -> None:
    region = Region(shape.layout, fill=1)
    connector = make_connector("source", region, shape, None, lambda: None, checksums=True, transport=transport)
    agent = make_agent("raw-source", transport)
    agent.register(
        address=region.region.base_address,
        num_bytes=region.region.total_bytes,
        device_index=0,
        memory=MemoryKind.DRAM,
    )
    workload = CpuWorkload()
    while True:
        method, argument = pipe.recv()
        connector.worker.collect()
        if method == "accept":
            pipe.send(connector.worker.accept(argument))
        elif method == "grant":
            num_tokens = len(argument) * shape.layout.block_size
            pipe.send(
                connector.scheduler.producer.grant_lease(request_id="r", block_ids=(argument,), num_tokens=num_tokens)
            )
        elif method == "prefill":
            pipe.send(_prefill(connector, shape, workload, argument))
        elif method == "raw":
            pipe.send((agent.metadata, region.region.base_address))
        else:
            connector.worker.close()
            agent.close()
            pipe.send(None)
            return


class CpuWorkload:
    """Computes products of small matrices: a counted amount of work, which takes longer if something else uses the
    CPU."""

    def __init__(self) -> None:
        self._matrix = np.full((128, 128), 0.01, dtype=np.float32)
        started = time.perf_counter()
        self._multiply(2000)
        self._products_per_s = 2000 / (time.perf_counter() - started)

    def run(self, seconds: float) -> None:
        """Do as much work as takes ``seconds`` on an idle CPU."""
        self._multiply(int(seconds * self._products_per_s))

    def _multiply(self, num_products: int) -> None:
        for _ in range(num_products):
            self._matrix @ self._matrix


def _prefill(
    connector: Connector, shape: BlockShape, workload: CpuWorkload, prompt: ChunkedPrompt
) -> tuple[KVTransferParams, float]:
    producer, num_announced, compute_s = connector.scheduler.producer, 0, 0.0
    for number, chunk in enumerate(prompt.chunks, start=1):
        started = time.perf_counter()
        if prompt.on_cpu:
            workload.run(prompt.chunk_s)
        else:
            time.sleep(prompt.chunk_s)
        compute_s += time.perf_counter() - started
        if number < len(prompt.chunks):
            producer.announce(request_id=prompt.request_id, first_block=num_announced, block_ids=(chunk,))
            num_announced += len(chunk)
    block_ids = prompt.block_ids
    num_tokens = len(block_ids) * shape.layout.block_size
    return producer.grant_lease(request_id=prompt.request_id, block_ids=(block_ids,), num_tokens=num_tokens), compute_s
