"""What a hand-over costs between two processes: memcpy, bare NIXL, and Baton's connector, in one run.

    python -m benchmarks.kv_transfer --json benchmarks/results/kv_transfer.json

A row ``{transport}/{block}/{number}/{order}`` is the median time from ``begin_load`` to the collected, confirmed end,
in milliseconds. Beside it, for the same blocks and alternating with it: ``raw_ms``, bare NIXL from making the request
to its end, one descriptor a block, no lease and no confirmation; ``no_checksums_ms``, Baton without verifying; and
after them ``memcpy_ms``, within one process. ``of_raw`` is raw_ms / value and ``fixed_ms`` the difference to raw_ms
without checksums. ``grant_ms`` is the source's part, with checksums and the pipe that carries the parameters here.
``share/{tokens}`` is the hand-over in percent of the time to first token of the built-in model on one CPU thread, and
of the first gap between tokens; ``checksums_percent`` is the part of both sides' checksums in the former.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import statistics
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

import numpy as np

from benchmarks.kv_source import NUM_BLOCKS, SHAPES, BlockShape, Region, SourceProcess, make_agent, make_connector
from benchmarks.report import Row, add_json_option, publish
from kv_transfer.connector import Connector
from kv_transfer.layout import MemoryKind
from kv_transfer.memory.block_memory import HostBlockMemory
from kv_transfer.params import KVTransferParams
from kv_transfer.transfer_options import TransportChoice
from kv_transfer.transport import ReadState

TRANSPORTS: dict[str, dict[str, str]] = {
    "shm": {},
    "local": {},
    "tcp": {"UCX_TLS": "tcp,self"},
    "tcp8k": {"UCX_TLS": "tcp,self", "UCX_TCP_TX_SEG_SIZE": "8k", "UCX_TCP_RX_SEG_SIZE": "8k"},
}
"""The transports that UCX may use: any, those between processes of one user that listen on nothing, or TCP only;
``tcp8k`` uses the segment size that is UCX's default.
"""

NUM_BLOCKS_READ = (1, 8, 64, 512)
PROMPT_TOKENS = (64, 256, 512, 900)
TOKENS_PER_BLOCK = 16
BYTES_PER_CASE = 512 << 20
WAIT_TIMEOUT_S = 60.0


@dataclass(slots=True, kw_only=True)
class Samples:
    """Seconds of each repetition, by measurement."""

    of: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        """Add one value."""
        self.of.setdefault(name, []).append(seconds)

    def median_ms(self, name: str) -> float:
        """The median in milliseconds."""
        return 1e3 * statistics.median(self.of[name])


class BareReader:
    """Bare NIXL between the same processes."""

    def __init__(self, region: Region, shape: BlockShape, source: SourceProcess, transport: TransportChoice) -> None:
        self._agent = make_agent("raw-reader", transport)
        ours = region.region
        self._agent.register(
            address=ours.base_address, num_bytes=ours.total_bytes, device_index=0, memory=MemoryKind.DRAM
        )
        metadata, address = source.raw()
        name = self._agent.add_remote(metadata)
        self._local, self._remote = (
            self._agent.prepare(
                owner,
                address=where,
                block_bytes=shape.layout.block_bytes,
                num_blocks=NUM_BLOCKS,
                device_index=0,
                memory=MemoryKind.DRAM,
            )
            for owner, where in ((None, ours.base_address), (name, address))
        )

    def read(self, source_block_ids: tuple[int, ...], block_ids: tuple[int, ...]) -> float:
        """Seconds of one READ."""
        started = time.perf_counter()
        transfer = self._agent.make_read(
            local=self._local,
            local_indices=np.array(block_ids, dtype=np.int32),
            remote=self._remote,
            remote_indices=np.array(source_block_ids, dtype=np.int32),
        )
        state = self._agent.post(transfer)
        while state is ReadState.ACTIVE:
            state = self._agent.state(transfer)
        seconds = time.perf_counter() - started
        assert state is ReadState.DONE
        self._agent.release(transfer)
        return seconds

    def close(self) -> None:
        """Destroy the agent."""
        self._agent.close()


class BatonReader:
    """A connector, measured from the order of a load to its collected end."""

    def __init__(
        self,
        name: str,
        region: Region,
        shape: BlockShape,
        source: SourceProcess,
        *,
        checksums: bool,
        transport: TransportChoice,
    ) -> None:
        self._woken = threading.Event()
        self._connector: Connector = make_connector(
            name, region, shape, source, self._woken.set, checksums=checksums, transport=transport
        )

    def read(self, params: KVTransferParams, block_ids: tuple[int, ...]) -> float:
        """Seconds of one load."""
        scheduler, worker = self._connector.scheduler, self._connector.worker
        self._woken.clear()
        started = time.perf_counter()
        scheduler.source.begin_load(request_id="r", params=params, first_block=0, block_ids=(block_ids,))
        worker.execute(scheduler.take_orders())
        while not (events := worker.collect()).loads:
            if not self._woken.wait(WAIT_TIMEOUT_S):
                raise TimeoutError(f"no end of a load of {len(block_ids)} blocks")
            self._woken.clear()
        seconds = time.perf_counter() - started
        assert events.loads[0].error is None, events.loads[0].error
        return seconds

    def close(self) -> None:
        """Stop it."""
        self._connector.worker.close()


class Bench:
    """All three ways to read from one source process."""

    def __init__(self, shape: BlockShape, transport: TransportChoice) -> None:
        self.shape = shape
        self.source = SourceProcess(shape, transport=transport)
        self.region = Region(shape.layout, fill=0)
        self.bare = BareReader(self.region, shape, self.source, transport)
        self.baton, self.plain = (
            BatonReader(name, self.region, shape, self.source, checksums=checksums, transport=transport)
            for name, checksums in (("reader", True), ("plain", False))
        )

    def measure(self, block_ids: tuple[int, ...], destinations: tuple[int, ...]) -> Samples:
        """Alternate the three ways, after one round of each that does not count."""
        samples = Samples()
        num_bytes = len(block_ids) * self.shape.layout.block_bytes
        num_repeats = max(3, min(30, BYTES_PER_CASE // num_bytes))
        memory = HostBlockMemory(self.region.region)
        for repeat in range(num_repeats + 1):
            bare_s = self.bare.read(block_ids, destinations)
            started = time.perf_counter()
            params = self.source.grant(block_ids)
            grant_s = time.perf_counter() - started
            baton_s = self.baton.read(params, destinations)
            plain_s = self.plain.read(self.source.grant(block_ids), destinations)
            started = time.perf_counter()
            memory.checksums(destinations)
            checksums_s = time.perf_counter() - started
            if repeat:
                for name, seconds in (
                    ("raw", bare_s),
                    ("grant", grant_s),
                    ("baton", baton_s),
                    ("plain", plain_s),
                    ("checksums", checksums_s),
                ):
                    samples.add(name, seconds)
        return samples

    def memcpy(self, block_ids: tuple[int, ...], destinations: tuple[int, ...], *, num_repeats: int = 3) -> float:
        """Median milliseconds of copying the same bytes within this process, block by block."""
        ours = self.region.region
        other = np.ones((max(block_ids) + 1, ours.block_bytes), dtype=np.uint8)
        samples = []
        for _ in range(num_repeats):
            started = time.perf_counter()
            for source, destination in zip(block_ids, destinations, strict=True):
                ctypes.memmove(
                    ours.block_address(destination), other.ctypes.data + source * ours.block_bytes, ours.block_bytes
                )
            samples.append(time.perf_counter() - started)
        return 1e3 * statistics.median(samples)

    def close(self) -> None:
        """Close both sides."""
        for reader in (self.bare, self.baton, self.plain):
            reader.close()
        self.source.close()


def rows_of_transport(transport: str) -> list[Row]:
    """Every shape, number and order over one transport. Runs in a process of its own."""
    rows: list[Row] = []
    for shape in SHAPES:
        bench = Bench(shape, "local" if transport == "local" else "network")
        counts = set(NUM_BLOCKS_READ)
        if transport == "local" and shape is SHAPES[0]:
            counts |= {-(-tokens // TOKENS_PER_BLOCK) for tokens in PROMPT_TOKENS}
        rows += [
            _row(bench, transport, num_blocks, order)
            for num_blocks in sorted(counts)
            for order in ("contiguous", "scattered")
        ]
        bench.close()
    return rows


def _row(bench: Bench, transport: str, num_blocks: int, order: str) -> Row:
    block_ids = tuple(range(num_blocks))
    destinations = block_ids
    if order == "scattered":
        rng = random.Random(num_blocks)
        block_ids, destinations = (tuple(rng.sample(range(NUM_BLOCKS), num_blocks)) for _ in range(2))
    samples = bench.measure(block_ids, destinations)
    value, raw_ms, plain_ms = (samples.median_ms(name) for name in ("baton", "raw", "plain"))
    num_bytes = num_blocks * bench.shape.layout.block_bytes
    return Row(
        name=f"{transport}/{bench.shape.name}/{num_blocks}/{order}",
        value=value,
        unit="ms",
        detail={
            "memcpy_ms": bench.memcpy(block_ids, destinations),
            "raw_ms": raw_ms,
            "no_checksums_ms": plain_ms,
            "of_raw": raw_ms / value,
            "of_raw_no_checksums": raw_ms / plain_ms,
            "fixed_ms": plain_ms - raw_ms,
            "grant_ms": samples.median_ms("grant"),
            "checksums_ms": samples.median_ms("checksums"),
            "gb_per_s": num_bytes / value / 1e6,
        },
    )


def share_rows(rows: list[Row]) -> list[Row]:
    """Compare the hand-over with times of the built-in model. Runs in a process of its own."""
    from benchmarks.builtin_times import builtin_times  # imported late: it loads torch

    by_name = {row.name: row for row in rows}
    shares = []
    for num_tokens in PROMPT_TOKENS:
        times = builtin_times(num_tokens)
        row = by_name[f"local/32KiB/{-(-num_tokens // TOKENS_PER_BLOCK)}/scattered"]
        checksums_ms = 2 * float(row.detail["checksums_ms"])
        shares.append(
            Row(
                name=f"share/{num_tokens}",
                value=100 * row.value / times.ttft_ms,
                unit="% of TTFT",
                detail={
                    "first_gap_percent": 100 * row.value / (row.value + times.decode_step_ms),
                    "checksums_percent": 100 * checksums_ms / times.ttft_ms,
                    "ttft_ms": times.ttft_ms,
                    "decode_step_ms": times.decode_step_ms,
                    "hand_over_ms": row.value,
                },
            )
        )
    return shares


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    options = parser.parse_args()
    rows: list[Row] = []
    for transport, variables in TRANSPORTS.items():
        os.environ.update(variables)
        with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
            rows += pool.submit(rows_of_transport, transport).result()
        for name in variables:
            del os.environ[name]
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        rows += pool.submit(share_rows, rows).result()
    publish(rows, packages=("nixl", "xxhash", "torch"), json_file=options.json, title="Hand-over of KV blocks")


if __name__ == "__main__":
    main()
