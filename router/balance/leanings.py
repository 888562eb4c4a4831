"""Which worker should lean to other work: a pure function of what all workers report, and of how long it has been so.

A leaning says whose work a worker prefers, and changes without a restart. Whoever decides changes one at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from router.balance.moves import WorkerState

EVIDENCE_S = 5.0
"""So long one kind of work must have too few workers before another one leans to it."""

MIN_STAY_S = 30.0
"""So long a worker keeps a leaning."""

HELD_S = 300.0
"""So long an operator's order stands."""

TTFT_S = 2.0
ITL_S = 0.1
"""What is aimed at where requests are promised nothing."""

CALM = 0.8
"""The work that gives a worker must be so far from trouble with those that are left: no change causes the opposite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaningWorker:
    """A worker, its ``leaning``, since when it has that, and the prompt tokens that wait there.

    ``busy``: the share of its time that it was in steps of late. An operator's order stands until ``held_until_s``.
    """

    state: WorkerState
    leaning: str
    since_s: float
    num_queued_tokens: int = 0
    busy: float = 0.0
    held_until_s: float = 0.0

    @property
    def prompt_wait_s(self) -> float:
        """Predicted time until what waits here is computed; 0 where nothing can be predicted."""
        if not self.state.is_known or not self.num_queued_tokens:
            return 0.0
        return self.state.step_time.prompt_seconds(self.num_queued_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """How near each kind of work is to breaking its promise: more than 1 breaks it."""

    prefill: float
    decode: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaningChange:
    """One worker that should lean to ``leaning``, and why."""

    replica_id: str
    leaning: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaningGoals:
    """What leanings are chosen for: bounds of promises, and the KV usage above which a worker is too full."""

    ttft_s: float
    itl_s: float
    max_usage: float


def pressure(workers: Collection[LeaningWorker], goals: LeaningGoals, *, but: str | None = None) -> Pressure:
    """That of both kinds of work; as it would be if the worker ``but`` leaned to the other kind.

    Work is taken to spread evenly over the workers that lean to it, as routers have it. Prompts that never wait may be
    all that their workers can compute: these must have time left for more.
    """
    numbers = {"prefill": 0, "decode": 0}
    waits_s = busy = gaps_s = usage = 0.0
    for worker in workers:
        leaning = worker.leaning if worker.state.replica_id != but else _other(worker.leaning)
        numbers[leaning] += 1
        waits_s += worker.prompt_wait_s
        usage += worker.state.usage
        if worker.leaning == "prefill":
            busy += worker.busy
        elif worker.state.is_known and worker.state.num_rows:
            gaps_s += worker.state.gap_s
    num_prefill, num_decode = max(numbers["prefill"], 1), max(numbers["decode"], 1)
    decode = max(gaps_s / num_decode / goals.itl_s, usage / num_decode / goals.max_usage)
    prefill = max(waits_s / num_prefill / goals.ttft_s, busy / num_prefill)
    return Pressure(prefill=prefill, decode=decode)


@dataclass(slots=True, kw_only=True)
class LeaningPolicy:
    """Remembers since when one kind of work has had too few workers; nothing else is kept between looks."""

    goals: LeaningGoals
    _leanings: Mapping[str, str] = field(default_factory=dict)
    _short_of: str | None = None
    _short_since_s: float = 0.0

    def look(self, workers: Sequence[LeaningWorker], now_s: float) -> LeaningChange | None:
        """The change that should be made now. With every change, whoever ordered it, what is remembered begins anew."""
        leanings = {worker.state.replica_id: worker.leaning for worker in workers}
        found = pressure(workers, self.goals)
        short_of = _short_of(found)
        if leanings != self._leanings or short_of != self._short_of:
            self._leanings, self._short_of, self._short_since_s = leanings, short_of, now_s
        if short_of is None or now_s - self._short_since_s < EVIDENCE_S:
            return None
        return self._change(workers, short_of, found, now_s)

    def _change(
        self, workers: Sequence[LeaningWorker], short_of: str, found: Pressure, now_s: float
    ) -> LeaningChange | None:
        giving = [worker for worker in workers if worker.leaning == _other(short_of)]
        if len(giving) < 2:
            return None
        free = [item for item in giving if now_s >= item.held_until_s and now_s - item.since_s >= MIN_STAY_S]
        for worker in sorted(free, key=_work_here):
            after = pressure(workers, self.goals, but=worker.state.replica_id)
            left = after.decode if short_of == "prefill" else after.prefill
            if left <= CALM:
                now = found.prefill if short_of == "prefill" else found.decode
                reason = f"{short_of} is at {now:.2f} of its promise, {worker.leaning} would be at {left:.2f}"
                return LeaningChange(replica_id=worker.state.replica_id, leaning=short_of, reason=reason)
        return None


def leads(own_id: str, live_ids: Collection[str]) -> bool:
    """True for the router that decides: of those that are alive the one with the smallest id."""
    return all(own_id <= router_id for router_id in live_ids)


def _short_of(found: Pressure) -> str | None:
    """The kind of work that has too few workers; None while neither has, or both have."""
    if found.prefill > 1.0 and found.decode <= CALM:
        return "prefill"
    if found.decode > 1.0 and found.prefill <= CALM:
        return "decode"
    return None


def _other(leaning: str) -> str:
    return "decode" if leaning == "prefill" else "prefill"


def _work_here(worker: LeaningWorker) -> tuple[float, float, str]:
    """What a change would disturb at a worker: its streams, its prompts."""
    return (worker.state.num_rows, worker.num_queued_tokens, worker.state.replica_id)
