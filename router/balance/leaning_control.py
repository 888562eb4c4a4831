"""Changes workers' leanings, one worker at a time: one of the live routers decides for all. And divides the work among
workers, which every router does for its own requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from router.balance.division import DivisionPolicy, WorkerLoad
from router.balance.leanings import (
    EVIDENCE_S,
    HELD_S,
    ITL_S,
    TTFT_S,
    LeaningChange,
    LeaningGoals,
    LeaningPolicy,
    LeaningWorker,
    leads,
)
from router.balance.rebalancer import KnownWorkers, lends_on, worker_state
from router.pool.replica import Replica
from router.pool.workers import WorkerError
from router.report.counters import RouterCounters
from router.report.router_report import LeaningNote
from router.settings import RouterSettings

logger = logging.getLogger(f"baton.{__name__}")


class LeaningOrders(Protocol):
    """Gives workers orders to lean."""

    async def lean(self, replica_id: str, role: str) -> str:
        """Have a worker prefer the work of a role.

        Returns:
            The role that it leaned to before.

        Raises:
            WorkerUnavailableError: The worker does not answer.
        """


class LeaningBoard(Protocol):
    """What routers tell each other (:class:`router.report.cluster_view.ClusterView`)."""

    def live_router_ids(self) -> Collection[str]:
        """Ids of this router and of the other live ones."""

    def note_leaning(self, change: LeaningNote) -> None:
        """Remember a change that this router ordered."""

    def hold_leaning(self, replica_id: str, *, until_s: float) -> None:
        """Remember an operator's order for a worker, and until when it stands."""

    def held_leanings(self) -> Mapping[str, float]:
        """The workers with an operator's order, from any router, and until when each order stands."""


@dataclass(slots=True, kw_only=True)
class _Seen:
    """What this router has seen of one worker: its leaning and since when, and its step seconds at the last look."""

    leaning: str
    since_s: float
    looked_at_s: float
    step_s: float
    busy: float = 0.0


class LeaningControl:
    """Looks once a report period, and orders a change if its router leads.

    It decides by the workers' reports alone, and every router sees those. So when the leader dies, the next one needs
    no state from it. The new leader first watches for as long as it needs to be sure; by then the other routers also
    know who leads. A worker whose leaning an operator has ordered is left alone until the order ends (``held``, in
    seconds since 1970).
    """

    def __init__(
        self,
        pool: KnownWorkers,
        orders: LeaningOrders,
        *,
        view: LeaningBoard,
        own_id: str,
        settings: RouterSettings,
        counters: RouterCounters,
        goals: LeaningGoals | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._pool = pool
        self._orders = orders
        self._view = view
        self._own_id = own_id
        self._settings = settings
        self._counters = counters
        self._goals = goals or goals_of(settings)
        self._clock = clock
        self._wall_clock = wall_clock
        self._seen: dict[str, _Seen] = {}
        self._policy = LeaningPolicy(goals=self._goals)
        self._division = DivisionPolicy(goals=self._goals)
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look, if the settings want it. Idempotent."""
        if self._settings.adapts_leanings and self._looking is None:
            self._looking = asyncio.create_task(self._keep_looking())

    async def close(self) -> None:
        """Order nothing more. Idempotent."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
            self._looking = None

    def hold(self, replica_id: str) -> None:
        """An operator chose a worker's leaning: every router leaves that worker alone for a while."""
        self._view.hold_leaning(replica_id, until_s=self._wall_clock() + HELD_S)

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self._settings.report_period_s)
            try:
                await self.look()
            except Exception:
                logger.exception("checking the workers' leanings failed")

    async def look(self) -> LeaningChange | None:
        """Order the change that is due now, if there is one and this router leads."""
        change = self._choose()
        if change is None:
            return None
        try:
            async with asyncio.timeout(self._settings.abort_timeout_s):
                await self._orders.lean(change.replica_id, change.leaning)
        except (WorkerError, TimeoutError) as error:
            logger.info("leaning not changed: replica_id=%s: %s", change.replica_id, error)
            return None
        self._counters.num_leaning_changes += 1
        self._view.note_leaning(
            LeaningNote(
                replica_id=change.replica_id,
                leaning=change.leaning,
                reason=change.reason,
                changed_at_s=self._wall_clock(),
            )
        )
        logger.info("leaning changed: replica_id=%s leaning=%s: %s", change.replica_id, change.leaning, change.reason)
        return change

    def _choose(self) -> LeaningChange | None:
        now_s, held, replicas = self._clock(), self._view.held_leanings(), self._replicas()
        self._divide(replicas, now_s)
        workers = [self._worker(replica, now_s, held) for replica in replicas]
        known = {worker.state.replica_id for worker in workers}
        self._seen = {name: seen for name, seen in self._seen.items() if name in known}
        if not leads(self._own_id, self._view.live_router_ids()):
            self._policy = LeaningPolicy(goals=self._goals)
            return None
        return self._policy.look(workers, now_s)

    def _divide(self, replicas: Sequence[Replica], now_s: float) -> None:
        """Have workers keep to one kind of work, or to none."""
        was_divided = any(replica.keeps_to is not None for replica in self._pool.replicas)
        parts = self._division.look([_load_of(replica) for replica in replicas], now_s)
        for replica in self._pool.replicas:
            replica.keep_to(parts.get(replica.replica_id))
        self._counters.num_divisions += bool(parts) and not was_divided

    def _replicas(self) -> list[Replica]:
        """The replicas that take requests, with a known leaning and fresh reports."""
        return [
            replica
            for replica in self._pool.replicas
            if replica.takes_requests
            and replica.load.leaning
            and self._pool.age_s(replica) < self._settings.stale_after_s
        ]

    def _worker(self, replica: Replica, now_s: float, held: Mapping[str, float]) -> LeaningWorker:
        load, name = replica.load, replica.replica_id
        step_s = load.counters.get("step_s", 0.0)
        seen = self._seen.get(name)
        if seen is None:
            seen = self._seen[name] = _Seen(leaning=load.leaning, since_s=now_s, looked_at_s=now_s, step_s=step_s)
        if seen.leaning != load.leaning:
            seen.leaning, seen.since_s = load.leaning, now_s
        if now_s > seen.looked_at_s:
            elapsed_s = now_s - seen.looked_at_s
            # A step longer than a report period is counted when it ends: the mean over several reports evens that out.
            seen.busy += (max(step_s - seen.step_s, 0.0) / elapsed_s - seen.busy) * min(elapsed_s / EVIDENCE_S, 1.0)
            seen.looked_at_s, seen.step_s = now_s, step_s
        held_for_s = held.get(name, 0.0) - self._wall_clock()
        return LeaningWorker(
            state=worker_state(replica),
            leaning=load.leaning,
            since_s=seen.since_s,
            num_queued_tokens=replica.queued_tokens,
            busy=min(seen.busy, 1.0),
            held_until_s=now_s + held_for_s,
        )


def _load_of(replica: Replica) -> WorkerLoad:
    load = replica.load
    return WorkerLoad(
        replica_id=replica.replica_id,
        num_streams=load.num_decoding + load.num_loading,
        num_context_tokens=load.num_context_tokens,
        num_queued_tokens=replica.queued_tokens,
        kv_usage=load.kv_usage,
        step_time=load.step_time,
        leans_to_prompts=replica.leaning_role.leans_to_prompts,
        order=replica.order,
        shares_cores=bool(lends_on(replica)),
    )


def goals_of(settings: RouterSettings) -> LeaningGoals:
    """The default promise of requests; without one, latencies that people tolerate."""
    promise = settings.promise
    return LeaningGoals(
        ttft_s=TTFT_S if promise.ttft_ms is None else promise.ttft_ms / 1000,
        itl_s=ITL_S if promise.itl_ms is None else promise.itl_ms / 1000,
        max_usage=settings.rebalance_max_kv_usage,
    )
