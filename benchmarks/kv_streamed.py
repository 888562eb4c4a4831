"""How much of a transfer hides behind the prefill when blocks are read while the prompt is computed.

    python -m benchmarks.kv_streamed --json benchmarks/results/kv_streamed.json

Two processes; the source computes a prompt chunk by chunk and announces each; plain and streamed hand-overs alternate.
What counts is the time from prefill's answer to the confirmed end of the load on decode: ``plain_ms`` and
``streamed_ms``. The value of ``{transport}/{block}/8 chunks`` is the share of the former that the latter hides, in
percent. 32 KiB blocks are those of the built-in model, whose prefill is work on a CPU of its own, for as long as the
model's own prefill takes; 2 MiB blocks are those of an 8B model, whose chunks of 512 tokens take 20 ms on a GPU, so
that the source's CPU is idle, and in any case 2.5 times as long as moving them (64 MiB at 8 GB/s): a machine too busy
to keep up with that would measure its own load. ``prefill_slower_percent`` is what reading along costs the prefill.
``share/{tokens}`` is what is left of the hand-over in percent of the built-in model's first gap between tokens, with
chunks of 128 tokens; in it ``plain_percent``, and both in percent of the time to first token.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from benchmarks.builtin_times import BuiltinTimes
from benchmarks.kv_source import SHAPES, BlockShape, ChunkedPrompt, Region, SourceProcess, make_connector
from benchmarks.report import Row, add_json_option, publish
from kv_transfer.params import PROTOCOL_VERSION, KVStreamParams, KVTransferParams, PeerIdentity

TRANSPORTS = {"shm": None, "tcp": "tcp,self"}
NUM_CHUNKS = 8
NUM_REPEATS = 9
BUILTIN_TOKENS = 896
SHARE_TOKENS = (256, 512, 900)
SHARE_CHUNK_TOKENS = 128
GPU_BLOCKS_PER_CHUNK = 32
GPU_CHUNK_S = 0.02
GPU_CHUNK_TRANSFERS = 2.5
MAX_CHUNK_S = 0.2
WAIT_TIMEOUT_S = 60.0


class StreamedBench:
    """One source process and one reader."""

    def __init__(self, shape: BlockShape) -> None:
        self.shape = shape
        self._source = SourceProcess(shape)
        self._region = Region(shape.layout, fill=0)
        self._woken = threading.Event()
        self._connector = make_connector("reader", self._region, shape, self._source, self._woken.set, checksums=True)
        self._serial = itertools.count()
        self._load(self._source.grant((0,)), (0,), stream_id=None)

    def hand_over(
        self, chunks: tuple[tuple[int, ...], ...], *, chunk_s: float, on_cpu: bool, streamed: bool
    ) -> tuple[float, float]:
        """Seconds from prefill's answer to the confirmed end of the load, and seconds that prefill computed."""
        prompt = ChunkedPrompt(request_id=f"r{next(self._serial)}", chunks=chunks, chunk_s=chunk_s, on_cpu=on_cpu)
        destinations = tuple(range(len(prompt.block_ids)))
        stream_id = prompt.request_id if streamed else None
        if stream_id is not None:
            self._begin_stream(stream_id, destinations)
        params, compute_s = self._source.prefill(prompt)
        return self._load(params, destinations, stream_id=stream_id), compute_s

    def close(self) -> None:
        """End both processes."""
        self._connector.worker.close()
        self._source.close()

    def _begin_stream(self, stream_id: str, block_ids: tuple[int, ...]) -> None:
        scheduler = self._connector.scheduler
        source = PeerIdentity(engine_id="source", incarnation="1")
        params = KVStreamParams(protocol_version=PROTOCOL_VERSION, source=source, timeout_s=WAIT_TIMEOUT_S)
        was_begun = scheduler.consumer.begin_stream(
            stream_id=stream_id, request_id=stream_id, params=params, first_block=0, block_ids=(block_ids,)
        )
        assert was_begun
        self._connector.worker.execute(scheduler.take_orders())

    def _load(self, params: KVTransferParams, block_ids: tuple[int, ...], *, stream_id: str | None) -> float:
        scheduler, worker = self._connector.scheduler, self._connector.worker
        self._woken.clear()
        started = time.perf_counter()
        if stream_id is None:
            scheduler.source.begin_load(request_id="r", params=params, first_block=0, block_ids=(block_ids,))
        else:
            scheduler.consumer.load_streamed(
                stream_id=stream_id, request_id="r", params=params, first_block=0, block_ids=(block_ids,)
            )
        worker.execute(scheduler.take_orders())
        while not (events := worker.collect()).loads:
            if not self._woken.wait(WAIT_TIMEOUT_S):
                raise TimeoutError(f"no end of a load of {len(block_ids)} blocks")
            self._woken.clear()
        seconds = time.perf_counter() - started
        assert events.loads[0].error is None, events.loads[0].error
        return seconds


def chunks_of(num_blocks: int, blocks_per_chunk: int) -> tuple[tuple[int, ...], ...]:
    """The blocks of a prompt, by chunk."""
    block_ids = tuple(range(num_blocks))
    return tuple(block_ids[start : start + blocks_per_chunk] for start in range(0, num_blocks, blocks_per_chunk))


def compare(
    bench: StreamedBench, chunks: tuple[tuple[int, ...], ...], *, chunk_s: float, on_cpu: bool
) -> dict[str, float]:
    """Alternate plain and streamed hand-overs: median milliseconds of both, and their difference."""
    exposed_s: dict[bool, list[float]] = {False: [], True: []}
    computed_s: dict[bool, list[float]] = {False: [], True: []}
    for repeat, streamed in itertools.product(range(NUM_REPEATS + 1), (False, True)):
        seconds, compute_s = bench.hand_over(chunks, chunk_s=chunk_s, on_cpu=on_cpu, streamed=streamed)
        if repeat:
            exposed_s[streamed].append(seconds)
            computed_s[streamed].append(compute_s)
    plain_ms, streamed_ms = (1e3 * statistics.median(exposed_s[streamed]) for streamed in (False, True))
    plain_compute, streamed_compute = (statistics.median(computed_s[streamed]) for streamed in (False, True))
    return {
        "hidden_percent": 100 * (1 - streamed_ms / plain_ms),
        "plain_ms": plain_ms,
        "streamed_ms": streamed_ms,
        "chunk_ms": 1e3 * chunk_s,
        "prefill_slower_percent": 100 * (streamed_compute / plain_compute - 1),
    }


def rows_of_transport(transport: str, builtin: dict[int, BuiltinTimes]) -> list[Row]:
    """Both shapes over one transport. Runs in a process of its own."""
    rows = []
    small, large = (StreamedBench(shape) for shape in SHAPES)
    num_small = BUILTIN_TOKENS // small.shape.layout.block_size
    builtin_chunk_s = builtin[BUILTIN_TOKENS].ttft_ms / NUM_CHUNKS / 1e3
    large_chunks = chunks_of(NUM_CHUNKS * GPU_BLOCKS_PER_CHUNK, GPU_BLOCKS_PER_CHUNK)
    plain_s, _ = large.hand_over(large_chunks, chunk_s=0.0, on_cpu=False, streamed=False)
    gpu_chunk_s = min(max(GPU_CHUNK_S, GPU_CHUNK_TRANSFERS * plain_s / NUM_CHUNKS), MAX_CHUNK_S)
    cases = (
        (small, chunks_of(num_small, num_small // NUM_CHUNKS), builtin_chunk_s, True),
        (large, large_chunks, gpu_chunk_s, False),
    )
    for bench, chunks, chunk_s, on_cpu in cases:
        detail = compare(bench, chunks, chunk_s=chunk_s, on_cpu=on_cpu)
        rows.append(
            Row(
                name=f"{transport}/{bench.shape.name}/{NUM_CHUNKS} chunks",
                value=detail.pop("hidden_percent"),
                unit="% of the transfer hidden",
                detail={**detail, "num_blocks": sum(len(chunk) for chunk in chunks)},
            )
        )
    if transport == "shm":
        rows += [_share_row(small, num_tokens, builtin[num_tokens]) for num_tokens in SHARE_TOKENS]
    for bench in (small, large):
        bench.close()
    return rows


def _share_row(bench: StreamedBench, num_tokens: int, times: BuiltinTimes) -> Row:
    block_size = bench.shape.layout.block_size
    chunks = chunks_of(-(-num_tokens // block_size), SHARE_CHUNK_TOKENS // block_size)
    detail = compare(bench, chunks, chunk_s=times.ttft_ms / len(chunks) / 1e3, on_cpu=True)
    plain_ms, streamed_ms = detail["plain_ms"], detail["streamed_ms"]
    return Row(
        name=f"share/{num_tokens}",
        value=100 * streamed_ms / (streamed_ms + times.decode_step_ms),
        unit="% of the first gap",
        detail={
            "plain_percent": 100 * plain_ms / (plain_ms + times.decode_step_ms),
            "of_ttft_percent": 100 * streamed_ms / times.ttft_ms,
            "plain_of_ttft_percent": 100 * plain_ms / times.ttft_ms,
            "ttft_ms": times.ttft_ms,
            "decode_step_ms": times.decode_step_ms,
            **detail,
        },
    )


def measure_builtin() -> dict[int, BuiltinTimes]:
    """Times of the built-in model. Runs in a process of its own, because it loads torch."""
    from benchmarks.builtin_times import builtin_times  # imported late, for the same reason

    return {num_tokens: builtin_times(num_tokens) for num_tokens in (BUILTIN_TOKENS, *SHARE_TOKENS)}


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--transports", nargs="+", choices=tuple(TRANSPORTS), default=tuple(TRANSPORTS))
    options = parser.parse_args()
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        builtin = pool.submit(measure_builtin).result()
    rows: list[Row] = []
    for transport in options.transports:
        tls = TRANSPORTS[transport]
        if tls is not None:
            os.environ["UCX_TLS"] = tls
        with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
            rows += pool.submit(rows_of_transport, transport, builtin).result()
        os.environ.pop("UCX_TLS", None)
    publish(rows, packages=("nixl", "xxhash", "torch"), json_file=options.json, title="Streamed hand-over")


if __name__ == "__main__":
    main()
