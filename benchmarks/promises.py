"""Gaps between tokens of running answers while long prompts arrive, for different promises: one engine, in this
process.

    python -m benchmarks.promises --json benchmarks/results/promises.json

An engine of the 125 M random Llama generates ``--streams`` answers while one prompt of ``PROMPT_TOKENS`` follows the
other. Rows ``<itl>/...``, with ``none`` where nothing is promised and ``chunk=<n>`` for
``long_prefill_token_threshold``, the setting that is tuned by hand: ``gap_p50``, ``gap_p99`` and ``gap_max`` of the
answers, ``ttft`` of the prompts (median), and ``tokens``, those of prompts and answers together, a second. ``kept`` is
the share of gaps within what was promised, ``error`` what the engine says of its predictions.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from benchmarks.arguments import count
from benchmarks.random_llama import VOCAB_SIZE, write_random_llama
from benchmarks.report import Row, add_json_option, publish
from engine.build import build_engine
from engine.contract.config import CacheConfig, EngineConfig, ModelConfigSource, SchedulerConfig
from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.promise import Promise
from engine.contract.token_ids import TokenIds
from engine.frontend.engine_core import EngineCore

PROMPT_TOKENS, STREAM_PROMPT_TOKENS, MAX_MODEL_LEN = 900, 64, 1024


@dataclass(slots=True)
class Load:
    """An engine with running answers, and its measurements."""

    core: EngineCore
    num_streams: int
    promise: Promise
    gaps_s: list[float] = field(default_factory=list)
    num_requests: int = 0
    num_tokens: int = 0

    def add(self, num_tokens: int, *, max_tokens: int) -> str:
        """Add a request of random tokens."""
        self.num_requests += 1
        name = f"r{self.num_requests}"
        self.core.add_request(
            GenerateRequest(
                request_id=name,
                prompt_token_ids=TokenIds.of(torch.randint(1, VOCAB_SIZE, (num_tokens,)).tolist()),
                sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                promise=self.promise,
            )
        )
        return name

    def keep_streams(self, running: dict[str, float]) -> None:
        """Replace answers that have ended. The first token of a new answer has no gap."""
        while len(running) < self.num_streams:
            running[self.add(STREAM_PROMPT_TOKENS, max_tokens=MAX_MODEL_LEN - STREAM_PROMPT_TOKENS)] = 0.0

    def run(self, num_prompts: int) -> list[float]:
        """Times to first token of this many prompts, one after the other, while the answers run."""
        running: dict[str, float] = {}
        ttfts_s: list[float] = []
        for _ in range(num_prompts):
            self.keep_streams(running)
            prompt, added_s = self.add(PROMPT_TOKENS, max_tokens=1), time.perf_counter()
            is_answered = False
            while not is_answered:
                deltas = self.core.step().deltas()
                now_s = time.perf_counter()
                for delta in deltas:
                    if delta.request_id == prompt:
                        is_answered = True
                        ttfts_s.append(now_s - added_s)
                        self.num_tokens += PROMPT_TOKENS
                        continue
                    self.num_tokens += len(delta.token_ids)
                    if running[delta.request_id]:
                        self.gaps_s.append(now_s - running[delta.request_id])
                    running[delta.request_id] = now_s
                    if delta.finish_reason is not None:
                        del running[delta.request_id]
        self.core.abort(running)
        while self.core.has_unfinished():
            self.core.step()
        return ttfts_s


def measure(name: str, directory: Path, *, itl_ms: float | None, chunk: int, options: argparse.Namespace) -> list[Row]:
    """Measure one engine."""
    config = EngineConfig(
        model=ModelConfigSource(path=directory, device="cpu", dtype="float32", num_threads=options.threads),
        cache=CacheConfig(kv_cache_bytes=1 << 30, prefault=True),
        scheduler=SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=64, long_prefill_token_threshold=chunk),
    )
    core = build_engine(config).core
    try:
        load = Load(core, options.streams, Promise(itl_ms=itl_ms))
        load.run(2)  # the engine gets to know its steps
        load.gaps_s.clear()
        load.num_tokens, started_s = 0, time.perf_counter()
        ttfts_s = load.run(options.prompts)
        seconds = time.perf_counter() - started_s
        return [*_rows(name, load, ttfts_s, seconds), Row(f"{name}/error", core.scheduler.step_time.error, "")]
    finally:
        core.close()


def _rows(name: str, load: Load, ttfts_s: Sequence[float], seconds: float) -> list[Row]:
    gaps_ms = np.array(load.gaps_s) * 1e3
    rows = [
        Row(f"{name}/gap_p50", float(np.percentile(gaps_ms, 50)), "ms"),
        Row(f"{name}/gap_p99", float(np.percentile(gaps_ms, 99)), "ms"),
        Row(f"{name}/gap_max", float(gaps_ms.max()), "ms"),
        Row(f"{name}/ttft", statistics.median(ttfts_s) * 1e3, "ms"),
        Row(f"{name}/tokens", load.num_tokens / seconds, "tok/s"),
    ]
    if load.promise.itl_ms is not None:
        rows.append(Row(f"{name}/kept", float((gaps_ms <= load.promise.itl_ms).mean()), ""))
    return rows


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--itl-ms", type=float, nargs="*", default=[400.0, 200.0, 100.0], help="inter-token latencies to promise"
    )
    parser.add_argument("--chunks", type=count, nargs="*", default=[64], help="long_prefill_token_threshold")
    parser.add_argument("--streams", type=count, default=4, help="number of answers being generated")
    parser.add_argument("--prompts", type=count, default=6, help="number of prompts that arrive meanwhile")
    parser.add_argument("--threads", type=count, default=2, help="number of compute threads")
    add_json_option(parser)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        write_random_llama(model, torch.float32)
        rows += measure("none", model, itl_ms=None, chunk=0, options=options)
        for chunk in options.chunks:
            rows += measure(f"chunk={chunk}", model, itl_ms=None, chunk=chunk, options=options)
        for itl_ms in options.itl_ms:
            rows += measure(f"{itl_ms:g}", model, itl_ms=itl_ms, chunk=0, options=options)
    publish(rows, packages=("torch", "numba"), json_file=options.json, title="Promises")


if __name__ == "__main__":
    main()
