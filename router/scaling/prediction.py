"""Predicts whether a number of workers would keep a load's promises, by replaying its requests in predicted times."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engine.contract.step_time import StepTimeModel
from router.placement.prediction import NEVER
from router.scaling.demand import Demand

SAFE = 0.8
"""Share of the promised TTFT that a prediction may use: it may be wrong, and other requests follow."""

SAFE_GAP = 0.95
"""The same share for the promised gap; it is larger because steps are cut to the promise."""

SPREAD = 2.0
"""There must be room for this many standard deviations of the number of streams above its mean."""

MAX_BUSY = 0.9
"""Largest share of their time that workers may be busy, if no promise sets a tighter bound."""

DEFAULT_ITL_S = 0.1
"""The target for gaps without a promise."""

MAX_KV_USAGE = 0.9
ROUNDING_S = 1e-9
LEAST_SPEED = 1e-3
MAX_RESCUES = 0.5
"""Largest share of their time that workers without streams may spend on prompts that would be late beside streams."""

NUM_DRAWN = 512
"""Number of random arrivals that a size is tested with, besides the recorded ones."""

CHUNK_TOKENS = 2048
"""Prompt tokens in one step beside streams without a promise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """How a number of workers would serve a load: the share of requests that keep their promise, and the share that
    could with any number of workers; seconds between tokens; the share of their time that the workers are busy.
    """

    attainment: float
    possible: float
    gap_s: float
    busy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """Predicts for identical workers. ``num_kv_tokens``: tokens that one worker's KV cache holds; 0: unknown."""

    step_time: StepTimeModel
    num_kv_tokens: float = 0.0

    def predict(self, demand: Demand, num_workers: int, *, seconds: Sequence[float] | None = None) -> Prediction:
        """How ``num_workers`` would serve all of a load. ``seconds``: the time of each prompt, if computed before.

        Streams are spread evenly, and steps with streams take no more prompt tokens than the promised gap allows.
        Prompts are computed in order of arrival, each by the first worker that is free. Those that would be late
        beside streams are computed by workers without streams, if fewer workers could take all streams.
        """
        model, seconds = self.step_time, self.prompt_seconds(demand) if seconds is None else seconds
        prompt_busy = sum(seconds) / demand.window_s * demand.pace / num_workers
        token_s = model.row_s + model.context_token_s * demand.num_context_tokens
        tokens_per_s = demand.tokens_per_s * demand.pace / num_workers
        free = 1.0 - prompt_busy - token_s * tokens_per_s
        if free <= 1.0 - MAX_BUSY and (seconds or tokens_per_s):
            return Prediction(attainment=0.0, possible=1.0, gap_s=math.inf, busy=1.0)
        gap_s = model.base_s / free if tokens_per_s else 0.0
        num_rows = tokens_per_s * gap_s
        most_rows = num_rows + SPREAD * math.sqrt(num_rows / num_workers)
        step_s = model.base_s + token_s * most_rows
        with_gaps = 1.0
        if tokens_per_s:
            fits = self._fits(most_rows, demand)
            with_gaps = _share_in_time(demand, step_s, model.base_s + token_s) if fits else 0.0
        share = self._stream_share(demand, model.base_s + token_s * max(num_rows, 1.0))
        speed = max(1.0 - min(num_rows, 1.0) * share, LEAST_SPEED)
        kept, possible = self._in_time(demand, seconds, num_workers, speed)
        return Prediction(
            attainment=kept * with_gaps,
            possible=possible,
            gap_s=step_s if tokens_per_s else 0.0,
            busy=1 - free,
        )

    def queued_seconds(self, num_tokens: float, demand: Demand) -> float:
        """Time of one worker for the prompts that wait, if they are as long as the load's prompts."""
        lengths = [item.num_new_tokens for item in demand.prompts]
        if not lengths or not num_tokens:
            return 0.0
        return sum(self.prompt_seconds(demand)) * num_tokens / sum(lengths)

    def prompt_share(self, demand: Demand) -> float:
        """The share of a load's work that goes into prompts."""
        prompts_s = sum(self.prompt_seconds(demand)) / demand.window_s
        streams_s = self._stream_workers(demand)
        total_s = prompts_s + streams_s
        return prompts_s / total_s if total_s else 0.5

    def most_streams(self, demand: Demand) -> float:
        """How many streams one worker can decode within the promised gap; infinite if there is no such promise."""
        bound_s = SAFE_GAP * demand.tight_gap_s
        if bound_s == NEVER or self.step_time.base_s > bound_s:
            return math.inf
        return self._streams_within(bound_s, demand)

    def _streams_within(self, gap_s: float, demand: Demand) -> float:
        """How many streams one worker decodes in steps of ``gap_s``; at least 1."""
        model = self.step_time
        token_s = model.row_s + model.context_token_s * demand.num_context_tokens
        return max((gap_s - model.base_s) / token_s, 1.0) if token_s else math.inf

    def prompt_seconds(self, demand: Demand) -> list[float]:
        """How long each prompt of a load takes a worker without other work."""
        model = self.step_time
        return [model.prompt_seconds(item.num_new_tokens, after=item.num_cached_tokens) for item in demand.prompts]

    def _fits(self, num_rows: float, demand: Demand) -> bool:
        """True if the KV of a worker's streams fits."""
        return not self.num_kv_tokens or num_rows * demand.num_context_tokens <= MAX_KV_USAGE * self.num_kv_tokens

    def _stream_share(self, demand: Demand, step_s: float) -> float:
        """The share of a worker's time that its streams take while it computes a prompt."""
        with_prompt_s = demand.tight_gap_s
        if with_prompt_s == NEVER:
            with_prompt_s = step_s + self.step_time.prompt_token_s * CHUNK_TOKENS
        return min(step_s / with_prompt_s, 1.0) if with_prompt_s else 1.0

    def _in_time(self, demand: Demand, seconds: Sequence[float], num_workers: int, speed: float) -> tuple[float, float]:
        """The shares of prompts with a first token in time: with ``num_workers``, and with any number of workers.

        The prompts are replayed twice: at their recorded times, and at random times with the same rate, because the
        recorded ones may be evenly spaced only by chance. The worse result counts. Workers run at a fraction ``speed``
        on average.
        """
        if demand.mean_ttft_s == NEVER:
            return 1.0, 1.0
        works = [(alone_s, SAFE * prompt.ttft_s) for prompt, alone_s in zip(demand.prompts, seconds, strict=True)]
        pace, rate, num_works = demand.pace, demand.rate, len(works)
        recorded = [(prompt.at_s / pace, *work) for prompt, work in zip(demand.prompts, works, strict=True)]
        drawn = [(at / rate, *works[int(pick * num_works)]) for at, pick in _DRAWN]
        num_without_streams = max(num_workers - math.ceil(pace * self._stream_workers(demand)), 0)
        shares = []
        for arrivals in (recorded, drawn):
            rescue_s = MAX_RESCUES * num_without_streams * len(arrivals) / rate
            num_kept = _num_in_time(arrivals, num_workers, speed, rescue_s)
            num_possible = sum([alone_s <= bound_s for _, alone_s, bound_s in arrivals])
            shares.append(num_kept / num_possible if num_possible else 1.0)
        possible = sum([alone_s <= bound_s for alone_s, bound_s in works]) / num_works
        return possible * min(shares), possible

    def _stream_workers(self, demand: Demand) -> float:
        """How few workers, not rounded, could take all streams at the original pace, in steps as long as the promised
        gap."""
        gap_s = demand.tight_gap_s if demand.tight_gap_s < NEVER else DEFAULT_ITL_S
        return demand.tokens_per_s * gap_s / self._streams_within(gap_s, demand)


def _draw() -> list[tuple[float, float]]:
    """Random arrivals (Poisson, one per unit of time), each with a number from 0 to 1. They are always the same, so
    that predictions are deterministic.
    """
    source, at, drawn = random.Random(0), 0.0, []
    for _ in range(NUM_DRAWN):
        at += source.expovariate(1.0)
        drawn.append((at, source.random()))
    return drawn


_DRAWN: Final = _draw()


def _share_in_time(demand: Demand, step_s: float, alone_s: float) -> float:
    """The share of streams for which a step is in time. Streams for which even a step of one stream alone would be late
    count as in time, because more workers would not help them.
    """
    late = [share for gap_s, share in demand.gaps_s if step_s > SAFE_GAP * gap_s and alone_s <= SAFE_GAP * gap_s]
    return 1.0 - sum(late)


def _num_in_time(
    arrivals: Sequence[tuple[float, float, float]], num_workers: int, speed: float, rescue_s: float
) -> int:
    """How many arrivals (time, work, and bound, in seconds) are done in time by workers that run at a fraction
    ``speed``, or else at full speed by those without streams, which have ``rescue_s`` for that, the shortest first.
    """
    free_s, num_kept, rescued_s = [0.0] * num_workers, 0, []
    for at_s, alone_s, bound_s in arrivals:
        began_s = free_s[0] if free_s[0] > at_s else at_s  # a call of max() would take half of the loop's time
        end_s = began_s + alone_s / speed
        heapq.heapreplace(free_s, end_s)
        late_at_s = at_s + bound_s + ROUNDING_S
        if end_s <= late_at_s:
            num_kept += 1
        elif began_s + alone_s <= late_at_s:
            rescued_s.append(alone_s)
    for alone_s in sorted(rescued_s):
        rescue_s -= alone_s
        num_kept += rescue_s >= 0.0
    return num_kept
