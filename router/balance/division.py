"""Whether workers should divide the work for a while: a few of them only generate, and all others only compute prompts.

Where a worker does both, every step that computes a prompt also makes one token of each stream, so it reads the weights
once more for every hundred milliseconds of prompts or less. Undivided, each request takes the cheapest plan, and one
more stream is cheap wherever streams are already; so in a burst of prompts nearly all workers lose that share of their
time. A choice for one request cannot see this, since the gain comes only if all of them follow.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.contract.role import Work
from engine.contract.step_time import StepTimeModel
from router.balance.leanings import LeaningGoals

WINDOW_S = 10.0
"""Work is divided by what was seen in this time, so that it stays divided from one burst to the next."""

PEAK = 0.25
"""It is divided only if waiting prompts took this share of the promised time to first token at the peak."""

CALM = 0.1
"""It is divided only if they took less than this share at the lowest: otherwise the cluster is behind for good, and
every worker should compute prompts."""

STEP_SHARE = 0.6
"""The share of a promised gap that a step with streams alone may take where work is divided. A stream that joins waits
for up to two steps."""

GAIN = 1.4
"""Undivided work must cost the time of this many times as many workers as would only generate. The margin is for what
dividing costs: workers that only generate cannot help with prompts, and a few workers share a load less evenly."""

LEAST_WORKERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """A worker's live streams, their context, the prompt tokens that wait there, and the share of KV blocks in use.

    ``leans_to_prompts``: see ``Role``. ``order``: a number by which all routers order workers alike.
    ``shares_cores``: it computes on the cores of idle workers of its host.
    """

    replica_id: str
    num_streams: int
    num_context_tokens: int
    num_queued_tokens: int
    kv_usage: float
    step_time: StepTimeModel
    leans_to_prompts: float = 0.0
    order: float = 0.0
    shares_cores: bool = False


@dataclass(frozen=True, slots=True)
class _Seen:
    """All streams' share of a step if one worker had them all, the mean time to compute what waits at a worker, and how
    many workers' KV blocks are in use."""

    at_s: float
    streams_s: float
    queue_s: float
    num_full: float


@dataclass(slots=True, kw_only=True)
class DivisionPolicy:
    """Remembers what it saw in the last ``WINDOW_S``. Every router decides by itself; all see the same reports."""

    goals: LeaningGoals
    _seen: deque[_Seen] = field(default_factory=deque)

    def look(self, workers: Sequence[WorkerLoad], now_s: float) -> Mapping[str, Work]:
        """What each worker should keep to; empty while the work should not be divided."""
        number = self._num_for_streams(workers, now_s)
        if not number:
            return {}
        ranked = sorted(workers, key=lambda item: (item.leans_to_prompts, item.order))
        return {item.replica_id: Work.STREAM if at < number else Work.PROMPT for at, item in enumerate(ranked)}

    def _num_for_streams(self, workers: Sequence[WorkerLoad], now_s: float) -> int:
        """How many workers should only generate; 0: the work should not be divided."""
        models = [item.step_time.on(1.0) for item in workers if item.step_time.num_steps]
        if len(workers) < LEAST_WORKERS or not models or any(item.shares_cores for item in workers):
            self._seen.clear()
            return 0
        self._note(workers, models, now_s)
        queues_s = [seen.queue_s for seen in self._seen]
        if max(queues_s) < PEAK * self.goals.ttft_s or min(queues_s) > CALM * self.goals.ttft_s:
            return 0
        base_s, streams_s = _mean([model.base_s for model in models]), max(seen.streams_s for seen in self._seen)
        room_s = STEP_SHARE * self.goals.itl_s - base_s
        if room_s <= 0.0:
            return 0
        num_full = max(seen.num_full for seen in self._seen)
        number = max(math.ceil(streams_s / room_s), math.ceil(num_full / self.goals.max_usage), 1)
        together_s = base_s + streams_s / len(workers)
        return number if number * GAIN < len(workers) * together_s / self.goals.itl_s else 0

    def _note(self, workers: Sequence[WorkerLoad], models: Sequence[StepTimeModel], now_s: float) -> None:
        while self._seen and self._seen[0].at_s < now_s - WINDOW_S:
            self._seen.popleft()
        row_s, token_s = _mean([model.row_s for model in models]), _mean([model.context_token_s for model in models])
        streams_s = sum(row_s * item.num_streams + token_s * item.num_context_tokens for item in workers)
        num_queued = sum(item.num_queued_tokens for item in workers)
        queue_s = num_queued * _mean([model.prompt_token_s for model in models]) / len(workers)
        num_full = sum(item.kv_usage for item in workers)
        self._seen.append(_Seen(now_s, streams_s, queue_s, num_full))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
