"""The part of an engine that a connector sees: a block of memory, the connector's two halves, and a clock that tests
can advance.
"""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np

from kv_transfer.cache_groups import GroupBlocks
from kv_transfer.chain.worker_connector import ChainWorker
from kv_transfer.connector import LeaseEnded, LoadEnded, Rendezvous
from kv_transfer.factory import build_connector
from kv_transfer.fault_options import FaultOptions
from kv_transfer.inproc import InProcessFabric
from kv_transfer.layout import KEYS_AND_VALUES, KVCacheGroup, KVLayout, KVRegion, MemoryKind
from kv_transfer.options import ConnectorOptions
from kv_transfer.params import PROTOCOL_VERSION, Hello, KVStreamParams, KVTransferParams, PeerIdentity
from kv_transfer.peer.worker_connector import TransferWorker
from kv_transfer.protocols import RemoteMatch
from kv_transfer.stats import TransferStats
from kv_transfer.transfer_options import TransportChoice
from tests.support.kv.tier_options import tier_options
from tests.support.waiting import WAIT_TIMEOUT_S, wait_until

Blocks = tuple[int, ...] | GroupBlocks
"""Blocks by KV cache group, or of a cache with a single group."""


def by_group(block_ids: Blocks) -> GroupBlocks:
    """Convert blocks to a tuple per group."""
    return cast("GroupBlocks", (block_ids,) if not block_ids or isinstance(block_ids[0], int) else block_ids)


@dataclass(frozen=True, kw_only=True)
class KVEngineSpec:
    """How to build a ``KVEngine``; can be sent to another process."""

    engine_id: str
    incarnation: str = "1"
    connector: str = "inproc"
    chain: tuple[str, ...] = ()
    num_tier_blocks: int = 0
    tier_folder: str | None = None
    model_hash: str = "model"
    windows: tuple[int | None, ...] = (None,)
    block_size: int = 4
    head_dim: int = 64
    num_parts: int = KEYS_AND_VALUES
    num_blocks: int = 64
    lease_ttl_s: float = 60.0
    load_timeout_s: float = 60.0
    answer_timeout_s: float = 60.0
    handshake_timeout_s: float = 10.0
    checksums: bool | None = None
    faults: FaultOptions | None = None
    streamed: bool = True
    transport: TransportChoice = "network"
    hung_read_timeout_s: float = 60.0

    @property
    def layout(self) -> KVLayout:
        """A layout of ``block_size * head_dim * num_parts * 8`` bytes a block."""
        return KVLayout(
            model_hash=self.model_hash,
            groups=tuple(
                KVCacheGroup(layers=(2 * group, 2 * group + 1), window=window)
                for group, window in enumerate(self.windows)
            ),
            num_kv_heads=1,
            head_dim=self.head_dim,
            block_size=self.block_size,
            dtype="float32",
            bytes_per_element=4,
            num_parts=self.num_parts,
        )


@dataclass
class OffsetClock:
    """The monotonic clock plus the time that a test added. At ``stands_at_s`` the test has stopped it."""

    offset_s: float = 0.0
    stands_at_s: float | None = None

    def __call__(self) -> float:
        now_s = time.monotonic() if self.stands_at_s is None else self.stands_at_s
        return now_s + self.offset_s


@dataclass
class KVEngine:
    """Memory and a connector. ``wait_*`` block until the event was collected, woken by the connector."""

    spec: KVEngineSpec
    rendezvous: Rendezvous
    fabric: InProcessFabric | None = None
    clock: OffsetClock = field(default_factory=OffsetClock)

    def __post_init__(self) -> None:
        spec = self.spec
        self.memory = np.zeros((spec.num_blocks, spec.layout.block_bytes), dtype=np.uint8)
        self.loads: list[LoadEnded] = []
        self.leases: list[LeaseEnded] = []
        self.stalled: list[str] = []
        self.ended_streams: list[str] = []
        self.num_wakes = 0
        self._woken = threading.Event()
        self.connector = build_connector(
            ConnectorOptions(
                connector=spec.connector,
                chain=spec.chain,
                **tier_options(
                    spec.chain,
                    num_bytes=spec.num_tier_blocks * spec.layout.block_bytes,
                    folder=None if spec.tier_folder is None else Path(spec.tier_folder),
                ),
                lease_ttl_s=spec.lease_ttl_s,
                load_timeout_s=spec.load_timeout_s,
                answer_timeout_s=spec.answer_timeout_s,
                handshake_timeout_s=spec.handshake_timeout_s,
                checksums=spec.checksums,
                streamed=spec.streamed,
                transport=spec.transport,
                hung_read_timeout_s=spec.hung_read_timeout_s,
                faults=spec.faults,
                allow_faults=True,
            ),
            identity=PeerIdentity(engine_id=spec.engine_id, incarnation=spec.incarnation),
            layout=spec.layout,
            region=KVRegion(
                base_address=self.memory.ctypes.data,
                num_blocks=spec.num_blocks,
                block_bytes=spec.layout.block_bytes,
                memory=MemoryKind.DRAM,
                device_index=0,
            ),
            rendezvous=self.rendezvous,
            wake=self._wake,
            clock=self.clock,
            fabric=self.fabric,
        )

    def _wake(self) -> None:
        self.num_wakes += 1
        self._woken.set()

    def fill(self, block_ids: tuple[int, ...], seed: int) -> None:
        """Write bytes that are different for each seed."""
        shape = (len(block_ids), self.memory.shape[1])
        self.memory[list(block_ids)] = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)

    def content(self, block_ids: tuple[int, ...]) -> bytes:
        """The bytes of some blocks, in order."""
        return self.memory[list(block_ids)].tobytes()

    def grant(self, request_id: str, block_ids: Blocks, num_tokens: int | None = None) -> KVTransferParams:
        """Lease blocks; by default full ones."""
        tables = by_group(block_ids)
        return self.connector.scheduler.producer.grant_lease(
            request_id=request_id,
            block_ids=tables,
            num_tokens=len(tables[0]) * self.spec.block_size if num_tokens is None else num_tokens,
        )

    def abort_lease(self, request_id: str) -> None:
        """End a lease at its source."""
        self.connector.scheduler.producer.abort_lease(request_id)

    def match(
        self,
        params: KVTransferParams | None,
        num_prompt_tokens: int,
        num_local_tokens: int,
        block_hashes: tuple[tuple[bytes, ...], ...] = (),
    ) -> RemoteMatch:
        """Ask the scheduler's half."""
        match = self.connector.scheduler.source.match(
            request_id="match",
            params=params,
            num_prompt_tokens=num_prompt_tokens,
            num_local_tokens=num_local_tokens,
            block_hashes=block_hashes,
        )
        assert match is not None
        return match

    def begin(
        self,
        request_id: str,
        params: KVTransferParams,
        block_ids: Blocks,
        first_block: int = 0,
        stream_id: str | None = None,
    ) -> None:
        """Order a load and let it start."""
        scheduler = self.connector.scheduler
        if stream_id is None:
            scheduler.source.begin_load(
                request_id=request_id, params=params, first_block=first_block, block_ids=by_group(block_ids)
            )
        else:
            scheduler.consumer.load_streamed(
                stream_id=stream_id,
                request_id=request_id,
                params=params,
                first_block=first_block,
                block_ids=by_group(block_ids),
            )
        self.step()

    def announce(self, request_id: str, block_ids: Blocks, first_block: int = 0) -> None:
        """Announce that blocks of a prompt are complete."""
        self.connector.scheduler.producer.announce(
            request_id=request_id, first_block=first_block, block_ids=by_group(block_ids)
        )

    def withdraw(self, request_id: str) -> None:
        """Withdraw announced blocks."""
        self.connector.scheduler.producer.withdraw(request_id)

    def begin_stream(self, stream_id: str, source: PeerIdentity, block_ids: Blocks, first_block: int = 0) -> bool:
        """Order a stream and start it; its id is the request's id."""
        was_begun = self.connector.scheduler.consumer.begin_stream(
            stream_id=stream_id,
            request_id=stream_id,
            params=KVStreamParams(protocol_version=PROTOCOL_VERSION, source=source, timeout_s=60.0),
            first_block=first_block,
            block_ids=by_group(block_ids),
        )
        self.step()
        return was_begun

    def cancel_stream(self, stream_id: str) -> bool:
        """Cancel a stream; True when it ended at once."""
        has_ended = self.connector.scheduler.consumer.cancel_stream(stream_id)
        self.step()
        return has_ended

    def wait_blocks(self, num_blocks: int) -> None:
        """Wait until this many blocks were read since the start."""
        wait_until(lambda: self.stats().num_blocks >= num_blocks)

    def cancel(self, request_id: str) -> None:
        """Cancel a load."""
        self.connector.scheduler.source.cancel_load(request_id)
        self.step()

    def release(self, params: KVTransferParams) -> None:
        """Release a hand-over that will not be read."""
        self.connector.scheduler.consumer.release(params)
        self.step()

    def step(self) -> None:
        """Run the connector's part of an engine step."""
        self.connector.worker.execute(self.connector.scheduler.take_orders())
        self.collect()

    def collect(self) -> None:
        """Collect the events of the connector."""
        events = self.connector.worker.collect()
        self.loads.extend(events.loads)
        self.leases.extend(events.leases)
        self.stalled.extend(events.stalled)
        self.ended_streams.extend(events.ended_streams)

    def expect(self, params: KVTransferParams) -> None:
        """Note that a request with this hand-over waits here."""
        self.connector.scheduler.consumer.expect(params)
        self.step()

    def pass_on(self, params: KVTransferParams) -> None:
        """Note that a request with this hand-over, which waited here, continues elsewhere."""
        self.connector.scheduler.consumer.pass_on(params)
        self.step()

    def wait_load(self, request_id: str) -> LoadEnded:
        """Wait for the end of a load."""
        self._wait_until(lambda: any(load.request_id == request_id for load in self.loads))
        (ended,) = [load for load in self.loads if load.request_id == request_id]
        return ended

    def wait_lease(self, lease_id: str) -> LeaseEnded:
        """Wait for the end of a lease."""
        self._wait_until(lambda: any(lease.lease_id == lease_id for lease in self.leases))
        (ended,) = [lease for lease in self.leases if lease.lease_id == lease_id]
        return ended

    def wait_stalled(self, request_id: str) -> None:
        """Wait until a load is reported as stalled."""
        self._wait_until(lambda: request_id in self.stalled)

    def load(
        self,
        request_id: str,
        params: KVTransferParams,
        block_ids: Blocks,
        first_block: int = 0,
        stream_id: str | None = None,
    ) -> LoadEnded:
        """Begin a load and wait for its end."""
        self.begin(request_id, params, block_ids, first_block, stream_id)
        return self.wait_load(request_id)

    def wait_stream(self, stream_id: str) -> None:
        """Wait until a cancelled stream is reported as ended."""
        self._wait_until(lambda: stream_id in self.ended_streams)

    def stats(self) -> TransferStats:
        """The connector's counters."""
        return self.connector.worker.stats()

    def hello(self) -> Hello:
        """The hello with which this engine introduces itself."""
        return self._peer_worker().hello

    def has_reads(self) -> bool:
        """True while something may write this engine's memory."""
        return self._peer_worker().has_reads

    def accept(self, hello: Hello) -> Hello:
        """Accept a peer's hello."""
        return self.connector.worker.accept(hello)

    def advance_clock(self, seconds: float) -> None:
        """Advance the clock of this engine only."""
        self.clock.offset_s += seconds

    def age_until(self, is_true: Callable[[], bool]) -> None:
        """Advance the clock of this engine only, at each check, until a condition holds."""

        def has_aged() -> bool:
            self.advance_clock(0.5)
            self.collect()
            return is_true()

        wait_until(has_aged)

    @contextmanager
    def standing_clock(self) -> Iterator[None]:
        """Stop the clock of this engine, except for time that is added, however long the machine takes."""
        self.clock.stands_at_s = time.monotonic()
        yield
        self.clock.stands_at_s = None

    def close(self) -> None:
        """Close the connector."""
        self.connector.worker.close()

    def _peer_worker(self) -> TransferWorker:
        worker = self.connector.worker
        peer_worker = worker.peers if isinstance(worker, ChainWorker) else worker
        assert isinstance(peer_worker, TransferWorker)
        return peer_worker

    def _wait_until(self, is_true: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WAIT_TIMEOUT_S
        while True:
            self._woken.clear()
            self.collect()
            if is_true():
                return
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                faulthandler.dump_traceback(all_threads=True)
                raise AssertionError(f"nothing within {WAIT_TIMEOUT_S} s; loads={self.loads} leases={self.leases}")
            self._woken.wait(left_s)
