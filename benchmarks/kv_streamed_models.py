"""What reading along costs a prefill on the CPU, and saves the first gap, with real models on the same cores.

    python -m benchmarks.kv_streamed_models --json benchmarks/results/kv_streamed_models.json

Two processes: an engine that computes a prompt chunk by chunk on one thread, and a connector that reads it over NIXL
and shared memory. Plain and streamed hand-overs of new prompts alternate. ``{mode}`` is how readers are told: ``auto``
as by default, ``every chunk`` as with ``streamed: true``. The value of ``{model}/{chunk} x {number}/{mode}`` is how
much more processor time both processes take, from the beginning of the prompt to its confirmed blocks, when it is read
along, in percent of the plain hand-over, median of the pairs: that says the same on a busy machine.
``plain_ttft_ms`` and ``streamed_ttft_ms`` are the medians of the prefill, ``plain_gap_ms`` and ``streamed_gap_ms`` of
what is left of the hand-over when prefill has answered; these need a quiet machine.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.builtin_times import MODEL
from benchmarks.report import Row, add_json_option, publish
from engine.build import build_engine
from engine.contract.config import CacheConfig, EngineConfig, ModelConfigSource, SchedulerConfig
from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.token_ids import TokenIds
from engine.frontend.engine_core import EngineCore
from kv_transfer.connector import Connector, Rendezvous, WakeCallback
from kv_transfer.errors import PeerUnreachableError
from kv_transfer.factory import build_connector
from kv_transfer.layout import KVLayout, KVRegion, MemoryKind
from kv_transfer.options import ConnectorOptions
from kv_transfer.params import PROTOCOL_VERSION, Hello, KVStreamParams, KVTransferParams, PeerIdentity
from kv_transfer.peer.worker_connector import TransferWorker

CASES = {"built-in": ((64, 8), (128, 7)), "125M": ((64, 8), (256, 4))}
NUM_REPEATS = 5
BLOCK_SIZE = 16
NUM_BLOCKS = 320
TIMEOUT_S = 120.0


class _Nobody:
    def meet(self, engine_id: str, hello: Hello, *, timeout_s: float) -> Hello:  # noqa: ARG002  (the Protocol's)
        raise PeerUnreachableError(engine_id=engine_id, reason="this side waits for the other one to connect")


MODES: dict[str, bool | Literal["auto"]] = {"auto": "auto", "every chunk": True}


def _connect(
    mode: str, name: str, layout: KVLayout, region: KVRegion, rendezvous: Rendezvous, wake: WakeCallback
) -> Connector:
    return build_connector(
        ConnectorOptions(connector="nixl", streamed=MODES[mode]),
        identity=PeerIdentity(engine_id=name, incarnation="1"),
        layout=layout,
        region=region,
        rendezvous=rendezvous,
        wake=wake,
    )


def _prefill(core: EngineCore, request_id: str, prompt: tuple[int, ...]) -> tuple[KVTransferParams, float]:
    started = time.perf_counter()
    core.add_request(
        GenerateRequest(
            request_id=request_id,
            prompt_token_ids=TokenIds.of(prompt),
            sampling=SamplingParams(max_tokens=2, ignore_eos=True),
            hand_over=True,
        )
    )
    while True:
        core.collect()
        for delta in core.step().deltas():
            if delta.kv_transfer is not None:
                return delta.kv_transfer, time.perf_counter() - started


def _serve(pipe: Connection, mode: str, model: Path, chunk_tokens: int) -> None:
    layouts: list[KVLayout] = []

    def connect(layout: KVLayout, region: KVRegion, wake: WakeCallback) -> Connector:
        layouts.append(layout)
        return _connect(mode, "prefill", layout, region, _Nobody(), wake)

    core = build_engine(
        EngineConfig(
            model=ModelConfigSource(path=model, device="cpu", dtype="auto", num_threads=1),
            cache=CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, enable_prefix_caching=False),
            scheduler=SchedulerConfig(max_num_batched_tokens=chunk_tokens, max_num_seqs=1),
        ),
        build_connector=connect,
    ).core
    assert isinstance(core.connector, TransferWorker)
    pipe.send(layouts[0])
    while True:
        method, arguments = pipe.recv()
        if method == "accept":
            pipe.send(core.connector.accept(*arguments))
        elif method == "cpu":
            pipe.send(time.process_time())
        elif method == "prefill":
            pipe.send(_prefill(core, *arguments))
        else:
            core.close()
            pipe.send(None)
            return


class Prefill:
    """The process that computes prompts."""

    def __init__(self, mode: str, model: Path, chunk_tokens: int) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._lock = threading.Lock()
        self._process = context.Process(target=_serve, args=(theirs, mode, model, chunk_tokens), daemon=True)
        self._process.start()
        self.layout: KVLayout = self._receive()

    def meet(self, engine_id: str, hello: Hello, *, timeout_s: float) -> Hello:  # noqa: ARG002  (the Protocol's)
        """Deliver a hello."""
        answer: Hello = self.call("accept", hello)
        return answer

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method in that process."""
        with self._lock:
            self._pipe.send((method, arguments))
            return self._receive()

    def compute(self, request_id: str, prompt: tuple[int, ...]) -> tuple[KVTransferParams, float]:
        """Hand a prompt over; also returns how long its prefill took."""
        answer: tuple[KVTransferParams, float] = self.call("prefill", request_id, prompt)
        return answer

    def close(self) -> None:
        """End the process."""
        self.call("close")
        self._process.join()

    def _receive(self) -> Any:
        if not self._pipe.poll(TIMEOUT_S):
            raise TimeoutError("the prefill process does not answer")
        return self._pipe.recv()


@dataclass(frozen=True, slots=True)
class HandOver:
    """Seconds until prefill answered, seconds from then until the blocks were confirmed, and CPU seconds meanwhile."""

    ttft_s: float
    gap_s: float
    cpu_s: float


class Decode:
    """Reads what a prefill process computes."""

    def __init__(self, mode: str, prefill: Prefill) -> None:
        layout = prefill.layout
        self._memory = np.ones((NUM_BLOCKS, layout.block_bytes), dtype=np.uint8)
        self._woken = threading.Event()
        self._prefill = prefill
        region = KVRegion(
            base_address=self._memory.ctypes.data,
            num_blocks=NUM_BLOCKS,
            block_bytes=layout.block_bytes,
            memory=MemoryKind.DRAM,
            device_index=0,
        )
        self._connector = _connect(mode, "decode", layout, region, prefill, self._woken.set)

    def hand_over(self, request_id: str, prompt: tuple[int, ...], *, is_streamed: bool) -> HandOver:
        """Read one prompt, from the start of its computation to its confirmed blocks."""
        scheduler, worker = self._connector.scheduler, self._connector.worker
        cpu_s = self._cpu_s()
        block_ids = tuple(range(-(-len(prompt) // BLOCK_SIZE)))
        if is_streamed:
            source = PeerIdentity(engine_id="prefill", incarnation="1")
            params = KVStreamParams(protocol_version=PROTOCOL_VERSION, source=source, timeout_s=TIMEOUT_S)
            scheduler.consumer.begin_stream(
                stream_id=request_id, request_id=request_id, params=params, first_block=0, block_ids=(block_ids,)
            )
            worker.execute(scheduler.take_orders())
        lease, ttft_s = self._prefill.compute(request_id, prompt)
        self._woken.clear()
        started = time.perf_counter()
        if is_streamed:
            scheduler.consumer.load_streamed(
                stream_id=request_id, request_id=request_id, params=lease, first_block=0, block_ids=(block_ids,)
            )
        else:
            scheduler.source.begin_load(request_id=request_id, params=lease, first_block=0, block_ids=(block_ids,))
        worker.execute(scheduler.take_orders())
        while not (events := worker.collect()).loads:
            if not self._woken.wait(TIMEOUT_S):
                raise TimeoutError("no end of a load")
            self._woken.clear()
        assert events.loads[0].error is None, events.loads[0].error
        return HandOver(ttft_s, time.perf_counter() - started, self._cpu_s() - cpu_s)

    def _cpu_s(self) -> float:
        return time.process_time() + float(self._prefill.call("cpu"))

    def close(self) -> None:
        """Stop it."""
        self._connector.worker.close()


def measure(name: str, mode: str, model: Path, chunk_tokens: int, num_chunks: int) -> Row:
    """Alternate plain and streamed hand-overs, after one of each that does not count."""
    prefill = Prefill(mode, model, chunk_tokens)
    decode = Decode(mode, prefill)
    rng = random.Random(chunk_tokens)
    found: dict[bool, list[HandOver]] = {True: [], False: []}
    for repeat in range(NUM_REPEATS + 1):
        for is_streamed in (True, False) if repeat % 2 else (False, True):
            prompt = tuple(rng.randrange(10, 1000) for _ in range(chunk_tokens * num_chunks - 1))
            result = decode.hand_over(f"{repeat}/{is_streamed}", prompt, is_streamed=is_streamed)
            if repeat:
                found[is_streamed].append(result)
    decode.close()
    prefill.close()
    plain, streamed = found[False], found[True]
    pairs = list(zip(streamed, plain, strict=True))
    return Row(
        name=f"{name}/{chunk_tokens} x {num_chunks}/{mode}",
        value=100 * (statistics.median(ours.cpu_s / theirs.cpu_s for ours, theirs in pairs) - 1),
        unit="% of CPU time",
        detail={
            "plain_ttft_ms": 1e3 * statistics.median(each.ttft_s for each in plain),
            "streamed_ttft_ms": 1e3 * statistics.median(each.ttft_s for each in streamed),
            "plain_cpu_ms": 1e3 * statistics.median(each.cpu_s for each in plain),
            "streamed_cpu_ms": 1e3 * statistics.median(each.cpu_s for each in streamed),
            "least_plain_ttft_ms": 1e3 * min(each.ttft_s for each in plain),
            "least_streamed_ttft_ms": 1e3 * min(each.ttft_s for each in streamed),
            "plain_gap_ms": 1e3 * statistics.median(each.gap_s for each in plain),
            "streamed_gap_ms": 1e3 * statistics.median(each.gap_s for each in streamed),
            "chunk_bytes": prefill.layout.block_bytes * chunk_tokens // BLOCK_SIZE,
        },
    )


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        import torch  # imported late: spawned processes load this module again

        from benchmarks.random_llama import write_random_llama

        large = Path(folder) / "125m"
        write_random_llama(large, torch.bfloat16)
        models = {"built-in": MODEL, "125M": large}
        rows = []
        for model, mode in itertools.product(CASES, MODES):
            for case in CASES[model]:
                rows.append(measure(model, mode, models[model], *case))
                print(rows[-1].name, f"{rows[-1].value:.1f} {rows[-1].unit}", rows[-1].detail, flush=True)
    publish(rows, packages=("nixl", "torch"), json_file=options.json, title="What reading along costs and saves")


if __name__ == "__main__":
    main()
