"""One router's view of the whole cluster: its own numbers, those of its peers, and those of all workers."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Protocol

from router.pool.role_view import RoleReplicas
from router.report.arrivals import NO_ARRIVALS, ArrivalSample, RecentArrivals
from router.report.counters import RouterCounters
from router.report.metric_rows import Labels, MetricFamily, gauge, render
from router.report.metrics import RouterMetrics
from router.report.router_report import (
    KnownRouter,
    LeaningNote,
    RouterBoard,
    RouterPeers,
    RouterReport,
    ScalingNote,
)
from router.report.status import cluster_status
from router.report.vllm_metrics import vllm_families
from router.report.worker_metrics import worker_families
from router.settings import RouterSettings

logger = logging.getLogger(f"baton.{__name__}")

MAX_SCALING_NOTES = 8
"""How many changes of pools' sizes are reported."""


class RouterUsage(Protocol):
    """The load of this router."""

    @property
    def num_alive(self) -> int:
        """Sequences in progress, including those that wait."""

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for room on a decode worker."""


class WantedWorkers(Protocol):
    """Knows how many workers each pool should have, by the configuration or by the load."""

    async def numbers(self, *, timeout_s: float) -> Mapping[str, int]:
        """The number by role; roles whose number is unknown now are left out."""


class ClusterView:
    """Answers /status and /metrics. Any router can be asked; its answer covers all of them.

    Routers ask each other when they start, when they are asked, and every ``peer_period_s``; a router that ends sends
    its last report to the others. So no counts are lost, except for the last seconds of a router that is killed.
    """

    def __init__(
        self,
        *,
        router_id: str,
        model_name: str,
        load: RouterUsage,
        pools: Sequence[RoleReplicas],
        metrics: RouterMetrics,
        counters: RouterCounters,
        peers: RouterPeers,
        settings: RouterSettings,
        node_ip: str | None = None,
    ) -> None:
        self._node_ip = node_ip
        self.wanted: WantedWorkers | None = None
        """The source of how many workers there should be; None if no cluster manages the workers."""
        self._num_wanted: dict[str, int] = {}
        self.created_s = int(time.time())
        self._router_id = router_id
        self._model_name = model_name
        self._load = load
        self._pools = tuple(pools)
        self._metrics = metrics
        self._counters = counters
        self._board = RouterBoard(peers, own_id=router_id)
        self._settings = settings
        self._leaning_change: LeaningNote | None = None
        self._held_leanings: dict[str, float] = {}
        self.own_arrivals: RecentArrivals | None = None
        self._scaling: deque[ScalingNote] = deque(maxlen=MAX_SCALING_NOTES)
        self._num_reports = 0
        self._meeting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Learn what the other routers know, and begin to poll them."""
        await self._meet()
        self._meeting = asyncio.create_task(self._keep_meeting())

    async def close(self) -> None:
        """Stop polling, and send the others this router's last report. Idempotent."""
        if self._meeting is not None:
            self._meeting.cancel()
            await asyncio.gather(self._meeting, return_exceptions=True)
            self._meeting = None
            await self._board.farewell(self.report(), timeout_s=self._settings.status_timeout_s)

    def note_farewell(self, report: RouterReport) -> None:
        """Keep the last report of a router that ended."""
        self._board.note_farewell(report)
        self._learn(report)

    def live_router_ids(self) -> list[str]:
        """This router and the ones that answered its last question, at most a ``peer_period_s`` ago."""
        others = [other.report.router_id for other in self._board.others if other.state == "running"]
        return [self._router_id, *others]

    def note_leaning(self, change: LeaningNote) -> None:
        """Record a change of leaning that this router decided."""
        self._leaning_change = change

    def hold_leaning(self, replica_id: str, *, until_s: float) -> None:
        """An operator chose a worker's leaning: no router changes it until then, in seconds since 1970."""
        now_s = time.time()
        self._held_leanings = {name: end_s for name, end_s in self._held_leanings.items() if end_s > now_s}
        self._held_leanings[replica_id] = until_s

    def held_leanings(self) -> dict[str, float]:
        """The workers whose leaning an operator ordered at any router, and until when each order stands."""
        held = dict(self._held_leanings)
        for other in self._board.others:
            for name, until_s in other.report.held_leanings.items():
                held[name] = max(until_s, held.get(name, 0.0))
        return held

    def held_now(self) -> dict[str, float]:
        """The orders among these that still stand, for workers that still exist."""
        here = {replica.replica_id for pool in self._pools for replica in pool.replicas}
        now_s = time.time()
        return {name: end_s for name, end_s in sorted(self.held_leanings().items()) if end_s > now_s and name in here}

    def last_leaning(self) -> LeaningNote | None:
        """The last change of a leaning by any router, by the routers' last reports."""
        return _newest([self._leaning_change, *(other.report.leaning_change for other in self._board.others)])

    def arrivals(self) -> list[ArrivalSample]:
        """The recent requests of this router, and of the other live ones by their last reports."""
        own = [self.own_arrivals.sample()] if self.own_arrivals is not None else []
        return own + [other.report.arrivals for other in self._board.others if other.state == "running"]

    def note_scaling(self, note: ScalingNote) -> None:
        """Record a change of a pool's size that this router decided."""
        self._scaling.append(note)

    def scaling_notes(self) -> list[ScalingNote]:
        """The last changes of pools' sizes by any router, by the routers' last reports, oldest first."""
        told = [*self._scaling, *(note for other in self._board.others for note in other.report.scaling)]
        return sorted(told, key=lambda note: note.changed_at_s)[-MAX_SCALING_NOTES:]

    def last_scaling(self, role: str) -> ScalingNote | None:
        """The last change of one pool's size."""
        return next((note for note in reversed(self.scaling_notes()) if note.role == role), None)

    def counters(self) -> RouterCounters:
        """Counters of all routers, including departed ones, by their last reports. Makes no call."""
        total = self._counters.plus(self._board.forgotten.counters)
        for other in self._board.others:
            total = total.plus(other.report.counters)
        return total

    def router_rows(self) -> dict[str, dict[str, object]]:
        """The routers that have not departed, by id, from their last reports. Makes no call."""
        load = self._load
        rows: dict[str, dict[str, object]] = {
            self._router_id: {"state": "running", "in_progress": load.num_alive, "waiting": load.num_waiting}
        }
        for other in self._board.others:
            if other.state != "departed":
                report = other.report
                told: dict[str, object] = {
                    "state": other.state,
                    "in_progress": report.num_alive,
                    "waiting": report.num_waiting,
                }
                rows[report.router_id] = told
        return rows

    def report(self) -> RouterReport:
        """What this router sends to other routers."""
        self._num_reports += 1
        return RouterReport(
            router_id=self._router_id,
            number=self._num_reports,
            pid=os.getpid(),
            created_s=self.created_s,
            num_alive=self._load.num_alive,
            num_waiting=self._load.num_waiting,
            counters=replace(self._counters),
            families=self._metrics.families(),
            departed={pool.role: pool.counters.departed() for pool in self._pools},
            forgotten={pool.role: pool.counters.forgotten() for pool in self._pools},
            gone=self._board.gone(),
            node_ip=self._node_ip,
            forgotten_routers=self._board.forgotten,
            leaning_change=self._leaning_change,
            held_leanings=dict(self._held_leanings),
            arrivals=NO_ARRIVALS if self.own_arrivals is None else self.own_arrivals.sample(),
            scaling=tuple(self._scaling),
        )

    async def status(self) -> dict[str, object]:
        """Ask every router and every replica now; return their rows and the totals."""
        routers = await self._routers()
        told = await cluster_status(
            model=self._model_name,
            routers=routers,
            forgotten=self._board.forgotten.counters,
            pools=self._pools,
            timeout_s=self._settings.status_timeout_s,
        )
        return {**told, "leanings": self._leanings(routers), "scaling": self._sizes()}

    def _sizes(self) -> dict[str, object]:
        """Which router decides the sizes of pools that follow the promises, and the last changes."""
        rules = self._settings.scaling
        return {
            "decided_by": None if rules is None else min(self.live_router_ids()),
            "last_changes": [asdict(note) for note in self.scaling_notes()],
        }

    def _leanings(self, routers: Sequence[KnownRouter]) -> dict[str, object]:
        """Which router decides leanings, the last change that a router made, and the operators' orders."""
        last = _newest([router.report.leaning_change for router in routers])
        return {
            "decided_by": min(self.live_router_ids()) if self._settings.adapts_leanings else None,
            "last_change": None if last is None else asdict(last),
            "held_until": self.held_now(),
        }

    async def metrics_text(self) -> bytes:
        """All metrics, for Prometheus: routers' rows have the label ``router``, workers' rows do not."""
        routers, _ = await asyncio.gather(self._routers(), self._ask_for_wanted())
        workers = worker_families(self._pools)
        return render([*_router_families(routers), self._wanted_family(), *workers, *self._compatible(routers)])

    def num_wanted(self) -> dict[str, int]:
        """How many workers each pool should have, by the last answer. Makes no call."""
        return dict(self._num_wanted)

    async def _ask_for_wanted(self) -> None:
        """Without an answer, the last known numbers stay: a worker may be lost at that moment, too."""
        if self.wanted is not None:
            self._num_wanted.update(await self.wanted.numbers(timeout_s=self._settings.status_timeout_s))

    def _wanted_family(self) -> MetricFamily:
        values: dict[Labels, float] = {(("role", role),): float(number) for role, number in self._num_wanted.items()}
        return gauge("baton:replicas_wanted", "Number of workers that the pool should have.", values)

    def _compatible(self, routers: Sequence[KnownRouter]) -> list[MetricFamily]:
        if self._settings.metrics_compat != "vllm":
            return []
        return vllm_families([router.report for router in routers], self._pools, model_name=self._model_name)

    async def _routers(self) -> list[KnownRouter]:
        """All routers, this one first."""
        others = await self._meet()
        return [KnownRouter(report=self.report(), state="running"), *others]

    async def _meet(self) -> tuple[KnownRouter, ...]:
        others = await self._board.refresh(timeout_s=self._settings.status_timeout_s)
        for other in others:
            self._learn(other.report)
        return others

    def _learn(self, report: RouterReport) -> None:
        for pool in self._pools:
            pool.counters.learn(report.departed.get(pool.role, ()), report.forgotten.get(pool.role))

    async def _keep_meeting(self) -> None:
        while True:
            await asyncio.sleep(self._settings.peer_period_s)
            try:
                await asyncio.gather(self._meet(), self._ask_for_wanted())
            except Exception:
                logger.exception("asking the other routers, or Serve for the number of workers, failed")


def _newest(changes: Sequence[LeaningNote | None]) -> LeaningNote | None:
    known = (change for change in changes if change is not None)
    return max(known, key=lambda item: item.changed_at_s, default=None)


def _router_families(routers: Sequence[KnownRouter]) -> list[MetricFamily]:
    families: list[MetricFamily] = []
    for router in routers:
        is_gone = router.state == "departed"
        families.extend(
            family.labelled(router=router.report.router_id)
            for family in router.report.families
            if not (is_gone and family.kind == "gauge")
        )
    is_up: dict[Labels, float] = {
        (("router", router.report.router_id),): float(router.state == "running")
        for router in routers
        if router.state != "departed"
    }
    return [*families, gauge("baton:router_up", "1 if the router answers the router that was asked.", is_up)]
