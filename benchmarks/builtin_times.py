"""Times of the built-in model alone, on one CPU thread: other costs are compared with these."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from engine.build import BuiltEngine, build_engine
from engine.contract.config import CacheConfig, EngineConfig, ModelConfigSource, SchedulerConfig
from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.token_ids import TokenIds
from engine.frontend.offline import generate

MODEL = Path(__file__).parent.parent / "engine" / "builtin_model"
NUM_REPEATS = 5
NUM_DECODED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinTimes:
    """Median times of an idle engine."""

    ttft_ms: float
    decode_step_ms: float


@lru_cache(maxsize=1)
def _engine() -> BuiltEngine:
    return build_engine(
        EngineConfig(
            model=ModelConfigSource(path=MODEL, device="cpu", dtype="auto", num_threads=1),
            cache=CacheConfig(num_blocks=512, enable_prefix_caching=False),
            scheduler=SchedulerConfig(),
        )
    )


def _seconds(num_prompt_tokens: int, num_tokens: int) -> Iterator[float]:
    rng = random.Random(num_prompt_tokens)
    for number in range(NUM_REPEATS + 1):
        request = GenerateRequest(
            request_id=f"{num_prompt_tokens}/{num_tokens}/{number}",
            prompt_token_ids=TokenIds.of(rng.randrange(10, 1000) for _ in range(num_prompt_tokens)),
            sampling=SamplingParams(max_tokens=num_tokens, ignore_eos=True),
        )
        started = time.perf_counter()
        generate(_engine().core, [request])
        if number:
            yield time.perf_counter() - started


def builtin_times(num_prompt_tokens: int) -> BuiltinTimes:
    """Measure the time to first token and the time of a decode step for prompts of this length."""
    first_s = statistics.median(_seconds(num_prompt_tokens, 1))
    all_s = statistics.median(_seconds(num_prompt_tokens, 1 + NUM_DECODED))
    return BuiltinTimes(ttft_ms=1e3 * first_s, decode_step_ms=1e3 * max(all_s - first_s, 0.0) / NUM_DECODED)
