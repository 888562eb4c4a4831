"""The reports that routers exchange, and what each keeps of all, so that any router can answer for the cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeAlias

from engine.versions import across_versions
from router.pool.pool_counters import DepartedWorker, ForgottenWorkers
from router.pool.workers import WorkerError
from router.report.arrivals import NO_ARRIVALS, ArrivalSample
from router.report.counters import RouterCounters
from router.report.metric_rows import MetricFamily
from router.stored_responses.directory import ResponsePeers
from router.stored_responses.store import Order, StoredResponse
from router.trace.directory import TracePeers
from router.trace.origin import Viewer

RouterState: TypeAlias = Literal["running", "unreachable", "departed"]

MAX_DEPARTED = 64
"""How many departed routers are reported one by one."""

_MAX_FORGOTTEN_NAMES = 256
"""How many earlier ones are kept by name only, so that they are not added again when another router reports them."""


@across_versions
@dataclass(frozen=True, slots=True, kw_only=True)
class ForgottenRouters:
    """The summed counters of routers that departed long ago, and the names of the last of them."""

    counters: RouterCounters = field(default_factory=RouterCounters)
    names: tuple[str, ...] = ()

    def with_more(self, reports: Sequence[RouterReport]) -> ForgottenRouters:
        """The same with these reports added."""
        counters = self.counters
        for report in reports:
            counters = counters.plus(report.counters)
        names = self.names + tuple(report.router_id for report in reports)
        return ForgottenRouters(counters=counters, names=names[-_MAX_FORGOTTEN_NAMES:])


@across_versions
@dataclass(frozen=True, slots=True, kw_only=True)
class LeaningNote:
    """A change of a worker's leaning, why, and when, in seconds since 1970."""

    replica_id: str
    leaning: str
    reason: str
    changed_at_s: float


@across_versions
@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingNote:
    """A change of a pool's wanted number of workers, why, and when, in seconds since 1970."""

    role: str
    wanted: int
    before: int
    reason: str
    changed_at_s: float


@across_versions
@dataclass(frozen=True, slots=True, kw_only=True)
class RouterReport:
    """One router at one moment. ``number`` grows with each report of the same router.

    ``departed`` are the departed workers that this router saw, by role, and ``forgotten`` the sums of those before
    them. ``gone`` are the last reports of departed routers, and ``forgotten_routers`` the sums of those before them.
    So routers that start later learn of all of them.
    ``leaning_change`` is the last one that this router ordered. ``held_leanings`` are the workers whose leaning an
    operator ordered, and until when, in seconds since 1970. If pools follow the promises, ``arrivals`` are this
    router's recent requests, and ``scaling`` the last changes of pools' sizes that it ordered, oldest first.

    During an update routers of two versions exchange reports (``engine.versions``).
    """

    router_id: str
    number: int
    pid: int
    created_s: int
    num_alive: int
    num_waiting: int
    counters: RouterCounters
    families: tuple[MetricFamily, ...]
    departed: Mapping[str, tuple[DepartedWorker, ...]]
    forgotten: Mapping[str, ForgottenWorkers] = field(default_factory=dict)
    gone: tuple[RouterReport, ...] = ()
    node_ip: str | None = None
    forgotten_routers: ForgottenRouters = field(default_factory=ForgottenRouters)
    leaning_change: LeaningNote | None = None
    held_leanings: Mapping[str, float] = field(default_factory=dict)
    arrivals: ArrivalSample = NO_ARRIVALS
    scaling: tuple[ScalingNote, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRouter:
    """The last report of a router, and whether the router is alive."""

    report: RouterReport
    state: RouterState


class RouterPeers(ResponsePeers, TracePeers, Protocol):
    """How to reach the other routers of the cluster. Ids are the ones that they give themselves."""

    async def report(self, router_id: str, *, timeout_s: float) -> RouterReport:
        """Ask one router for its report.

        Raises:
            WorkerUnavailableError: It is gone, or does not answer in time.
        """

    async def farewell(self, router_id: str, report: RouterReport, *, timeout_s: float) -> None:
        """Send one router the last report of this router.

        Raises:
            WorkerUnavailableError: It is gone, or does not answer in time.
        """


class NoPeers:
    """The peers of a router that is alone: there are none."""

    def peer_ids(self) -> Sequence[str]:
        """No ids."""
        return ()

    async def report(self, router_id: str, *, timeout_s: float) -> RouterReport:
        """Nobody can be asked."""
        raise NotImplementedError

    async def farewell(self, router_id: str, report: RouterReport, *, timeout_s: float) -> None:
        """Nobody hears it."""
        raise NotImplementedError

    async def take_order(
        self, router_id: str, order: Order, response_id: str, *, owner: str, timeout_s: float
    ) -> StoredResponse | None:
        """Nobody keeps one."""
        raise NotImplementedError

    async def find_trace(self, router_id: str, request_id: str, *, viewer: Viewer, timeout_s: float) -> bytes | None:
        """Nobody keeps one."""
        raise NotImplementedError

    async def last_traces(self, router_id: str, limit: int, *, viewer: Viewer, timeout_s: float) -> bytes:
        """Nobody keeps any."""
        raise NotImplementedError


class RouterBoard:
    """The newest report of each other router, the last report of departed ones, and the sum of those before them."""

    def __init__(self, peers: RouterPeers, *, own_id: str) -> None:
        self._peers = peers
        self._own_id = own_id
        self._known: dict[str, KnownRouter] = {}
        self._num_begun = 0
        self._newest = 0
        """The number of the newest question answered; answers to earlier questions are outdated."""
        self.forgotten = ForgottenRouters()

    @property
    def others(self) -> tuple[KnownRouter, ...]:
        """All other routers that are known, as of the last ``refresh``."""
        return tuple(self._known.values())

    def gone(self) -> tuple[RouterReport, ...]:
        """The last reports of departed routers."""
        return tuple(known.report for known in self._known.values() if known.state == "departed")

    def note_farewell(self, report: RouterReport) -> None:
        """Keep the last report of a router that ends."""
        self._learn_forgotten([report])
        if report.router_id in self.forgotten.names:
            return
        self._newest = self._num_begun + 1
        self._note(report)
        self._known[report.router_id] = _departed(self._known[report.router_id])

    async def farewell(self, report: RouterReport, *, timeout_s: float) -> None:
        """Send the last report of this router to all others that can be reached in time."""
        await asyncio.gather(*(self._tell(router_id, report, timeout_s) for router_id in self._peers.peer_ids()))

    async def _tell(self, router_id: str, report: RouterReport, timeout_s: float) -> None:
        with contextlib.suppress(WorkerError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._peers.farewell(router_id, report, timeout_s=timeout_s)

    async def refresh(self, *, timeout_s: float) -> tuple[KnownRouter, ...]:
        """Ask all other routers concurrently, each for at most ``timeout_s``.

        Answers that arrive after those to a later question, or after a router's last report, are dropped: they could
        bring back a router that has departed meanwhile.
        """
        self._num_begun += 1
        number, router_ids = self._num_begun, self._peers.peer_ids()
        answers = await asyncio.gather(*(self._ask(router_id, timeout_s) for router_id in router_ids))
        if number < self._newest:
            return self.others
        self._newest = number
        reports = [report for report in answers if report is not None]
        answered = {report.router_id for report in reports}
        self._learn_forgotten(reports)
        settled = {*answered, self._own_id, *self.forgotten.names}
        for report in reports:
            for gone in report.gone:
                if gone.router_id not in settled:
                    self._note(gone)
            self._note(report)
        for router_id, known in self._known.items():
            if router_id in answered:
                continue
            if router_id in router_ids:
                self._known[router_id] = KnownRouter(report=known.report, state="unreachable")
            elif known.state != "departed":
                self._known[router_id] = _departed(known)
        self._forget_oldest()
        return self.others

    async def _ask(self, router_id: str, timeout_s: float) -> RouterReport | None:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._peers.report(router_id, timeout_s=timeout_s)
        except (WorkerError, TimeoutError):
            return None

    def _note(self, report: RouterReport) -> None:
        known = self._known.pop(report.router_id, None)
        is_newer = known is None or report.number > known.report.number
        newest = report if is_newer or known is None else known.report
        self._known[report.router_id] = KnownRouter(report=replace(newest, gone=()), state="running")

    def _learn_forgotten(self, reports: Sequence[RouterReport]) -> None:
        """Take over the forgotten routers of others, but only if this router has none itself, for example if it is new:
        two sums may overlap, and nobody could tell."""
        if self.forgotten.names:
            return
        self.forgotten = max(
            (report.forgotten_routers for report in reports), key=lambda item: len(item.names), default=self.forgotten
        )
        for router_id in self.forgotten.names:
            self._known.pop(router_id, None)

    def _forget_oldest(self) -> None:
        """Forget the routers that started first, so that all routers forget the same ones, and totals agree."""
        departed = [known.report for known in self._known.values() if known.state == "departed"]
        departed.sort(key=lambda report: (report.created_s, report.router_id))
        oldest = departed[:-MAX_DEPARTED]
        for report in oldest:
            del self._known[report.router_id]
        self.forgotten = self.forgotten.with_more(oldest)


def _departed(known: KnownRouter) -> KnownRouter:
    """The last report of a departed router, without what it knew of others, which has been learned from it."""
    report = replace(
        known.report, departed={}, forgotten={}, forgotten_routers=ForgottenRouters(), arrivals=NO_ARRIVALS
    )
    return KnownRouter(report=report, state="departed")
