"""Which worker should change its leaning: a pure function of all workers' reports, and of how long they say the same.

A leaning says which role's work a worker prefers; it changes without a restart. Only one is changed at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from engine.contract.role import Role, Work
from router.balance.moves import WorkerState
from router.roles import role_for, role_named

EVIDENCE_S = 5.0
"""How long one kind of work must have too few workers before another worker leans to it."""

MIN_STAY_S = 30.0
"""How long a worker keeps a leaning at least."""

HELD_S = 300.0
"""How long an operator's order stands."""

TTFT_S = 2.0
ITL_S = 0.1
"""Targets used if requests have no promise."""

CALM = 0.8
"""The work that gives up a worker must stay below this pressure without it, so that no change causes its reverse."""


_OTHER: Final = {Work.PROMPT: Work.STREAM, Work.STREAM: Work.PROMPT}

Pressure: TypeAlias = Mapping[Work, float]
"""How near each kind of work is to breaking its promise; above 1 it is broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaningWorker:
    """A worker, its ``leaning``, since when it has it, and the prompt tokens that wait there.

    ``busy``: the recent share of its time that it spent in steps. An operator's order stands until ``held_until_s``.
    """

    state: WorkerState
    leaning: str
    since_s: float
    num_queued_tokens: int = 0
    busy: float = 0.0
    held_until_s: float = 0.0

    @property
    def role(self) -> Role:
        """The role that it leans to."""
        return role_named(self.leaning)

    @property
    def prompt_wait_s(self) -> float:
        """Predicted time to compute the prompts that wait here; 0 if nothing can be predicted."""
        if not self.state.is_known or not self.num_queued_tokens:
            return 0.0
        return self.state.step_time.prompt_seconds(self.num_queued_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaningChange:
    """One worker that should lean to ``leaning``, and why."""

    replica_id: str
    leaning: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaningGoals:
    """What leanings should achieve: bounds on latencies, and the KV usage above which a worker is too full."""

    ttft_s: float
    itl_s: float
    max_usage: float


def pressure(workers: Collection[LeaningWorker], goals: LeaningGoals, *, but: str | None = None) -> Pressure:
    """The pressure of both kinds of work; with ``but``, as if that worker leaned to the other kind.

    Work is assumed to spread evenly over the workers that lean to it, because routers spread it so. Workers may be at
    their limit though no prompt waits, so the busy time of those that lean to prompts alone counts too.
    """
    numbers: Counter[Work] = Counter()
    waits_s = busy = gaps_s = usage = 0.0
    for worker in workers:
        prefers = worker.role.prefers
        numbers.update(prefers if worker.state.replica_id != but else map(_OTHER.__getitem__, prefers))
        waits_s += worker.prompt_wait_s
        usage += worker.state.usage
        if Work.STREAM not in prefers:
            busy += worker.busy
        elif worker.state.is_known and worker.state.num_rows:
            gaps_s += worker.state.gap_s
    for_prompts, for_streams = max(numbers[Work.PROMPT], 1), max(numbers[Work.STREAM], 1)
    return {
        Work.PROMPT: max(waits_s / for_prompts / goals.ttft_s, busy / for_prompts),
        Work.STREAM: max(gaps_s / for_streams / goals.itl_s, usage / for_streams / goals.max_usage),
    }


@dataclass(slots=True, kw_only=True)
class LeaningPolicy:
    """Remembers only since when one kind of work has had too few workers."""

    goals: LeaningGoals
    _leanings: Mapping[str, str] = field(default_factory=dict)
    _short_of: Work | None = None
    _short_since_s: float = 0.0

    def look(self, workers: Sequence[LeaningWorker], now_s: float) -> LeaningChange | None:
        """The change that is due now, or None. Any changed leaning, whoever ordered it, resets what is remembered."""
        leanings = {worker.state.replica_id: worker.leaning for worker in workers}
        found = pressure(workers, self.goals)
        short_of = _short_of(found)
        if leanings != self._leanings or short_of != self._short_of:
            self._leanings, self._short_of, self._short_since_s = leanings, short_of, now_s
        if short_of is None or now_s - self._short_since_s < EVIDENCE_S:
            return None
        return self._change(workers, short_of, found, now_s)

    def _change(
        self, workers: Sequence[LeaningWorker], short_of: Work, found: Pressure, now_s: float
    ) -> LeaningChange | None:
        plenty, role = _OTHER[short_of], role_for(short_of).name
        giving = [worker for worker in workers if worker.role.prefers == (plenty,)]
        if len(giving) < 2:
            return None
        free = [item for item in giving if now_s >= item.held_until_s and now_s - item.since_s >= MIN_STAY_S]
        for worker in sorted(free, key=_work_here):
            left = pressure(workers, self.goals, but=worker.state.replica_id)[plenty]
            if left <= CALM:
                now = found[short_of]
                reason = f"{role} is at {now:.2f} of its promised latency, {worker.leaning} would be at {left:.2f}"
                return LeaningChange(replica_id=worker.state.replica_id, leaning=role, reason=reason)
        return None


def leads(own_id: str, live_ids: Collection[str]) -> bool:
    """True for the router that decides: the live one with the smallest id."""
    return all(own_id <= router_id for router_id in live_ids)


def _short_of(found: Pressure) -> Work | None:
    """The kind of work that has too few workers; None if neither has, or both have."""
    return next((work for work in Work if found[work] > 1.0 and found[_OTHER[work]] <= CALM), None)


def _work_here(worker: LeaningWorker) -> tuple[float, float, str]:
    """What a change would disturb at a worker: its streams, its prompts."""
    return (worker.state.num_rows, worker.num_queued_tokens, worker.state.replica_id)
