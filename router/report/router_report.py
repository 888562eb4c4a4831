"""What one router tells another of itself, and what each remembers of all: any of them can answer for the whole."""

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
"""So many routers that are gone are told of by name."""

_MAX_FORGOTTEN_NAMES = 256
"""Of those before them so many names are known, so that another router that still tells of one adds nothing."""


@across_versions
@dataclass(frozen=True, slots=True, kw_only=True)
class ForgottenRouters:
    """What routers counted that are gone for long, in sum, and the names of the last of them."""

    counters: RouterCounters = field(default_factory=RouterCounters)
    names: tuple[str, ...] = ()

    def with_more(self, reports: Sequence[RouterReport]) -> ForgottenRouters:
        """These, too."""
        counters = self.counters
        for report in reports:
            counters = counters.plus(report.counters)
        names = self.names + tuple(report.router_id for report in reports)
        return ForgottenRouters(counters=counters, names=names[-_MAX_FORGOTTEN_NAMES:])


@across_versions
@dataclass(frozen=True, slots=True, kw_only=True)
class LeaningNote:
    """A worker's leaning that was changed, why, and when, in seconds since 1970."""

    replica_id: str
    leaning: str
    reason: str
    changed_at_s: float


@across_versions
@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingNote:
    """A pool that is to have another number of workers, why, and since when, in seconds since 1970."""

    role: str
    wanted: int
    before: int
    reason: str
    changed_at_s: float


@across_versions
@dataclass(frozen=True, slots=True, kw_only=True)
class RouterReport:
    """One router at one moment. ``number`` grows with each report of the same router.

    ``departed`` are the workers, by role, that this router saw and that are gone, ``forgotten`` those before them;
    ``gone`` are the last reports of routers that are gone, ``forgotten_routers`` those before them, so that those who
    come later know of them too.
    ``leaning_change`` is the last one that this router ordered. ``held_leanings`` are the workers whose leaning an
    operator chose, and until when that stands, in seconds since 1970. ``arrivals`` are its last requests, where pools
    follow the promises, and ``scaling`` the last changes of their sizes that it ordered, oldest first.

    Routers of two versions tell each other of themselves during an update (``engine.versions``).
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
    """A router as it was last heard of, and whether it is there."""

    report: RouterReport
    state: RouterState


class RouterPeers(ResponsePeers, TracePeers, Protocol):
    """The other routers of the cluster. Their ids are those that they call themselves."""

    async def report(self, router_id: str, *, timeout_s: float) -> RouterReport:
        """Ask one.

        Raises:
            WorkerUnavailableError: It is gone, or does not answer in time.
        """

    async def farewell(self, router_id: str, report: RouterReport, *, timeout_s: float) -> None:
        """Leave one the last word of this router.

        Raises:
            WorkerUnavailableError: It is gone, or does not answer in time.
        """


class NoPeers:
    """A router that is alone."""

    def peer_ids(self) -> Sequence[str]:
        """Nobody."""
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
    """The newest report of each other router; of those that are gone, the last, and of those before them the sum."""

    def __init__(self, peers: RouterPeers, *, own_id: str) -> None:
        self._peers = peers
        self._own_id = own_id
        self._known: dict[str, KnownRouter] = {}
        self._num_begun = 0
        self._newest = 0
        """What was asked before this is old: somebody has said by now who is there."""
        self.forgotten = ForgottenRouters()

    @property
    def others(self) -> tuple[KnownRouter, ...]:
        """All that were ever heard of, as of the last ``refresh``."""
        return tuple(self._known.values())

    def gone(self) -> tuple[RouterReport, ...]:
        """The last reports of those that are gone."""
        return tuple(known.report for known in self._known.values() if known.state == "departed")

    def note_farewell(self, report: RouterReport) -> None:
        """Remember the last word of a router that ends."""
        self._learn_forgotten([report])
        if report.router_id in self.forgotten.names:
            return
        self._newest = self._num_begun + 1
        self._note(report)
        self._known[report.router_id] = _departed(self._known[report.router_id])

    async def farewell(self, report: RouterReport, *, timeout_s: float) -> None:
        """Leave the last word of this router with all others that can be reached in time."""
        await asyncio.gather(*(self._tell(router_id, report, timeout_s) for router_id in self._peers.peer_ids()))

    async def _tell(self, router_id: str, report: RouterReport, timeout_s: float) -> None:
        with contextlib.suppress(WorkerError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._peers.farewell(router_id, report, timeout_s=timeout_s)

    async def refresh(self, *, timeout_s: float) -> tuple[KnownRouter, ...]:
        """Ask all of them at once, none for longer than ``timeout_s``.

        Answers that come behind those to a later question, or behind a last word, tell nothing: a router that went
        meanwhile would be there again.
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
        """Take what others have forgotten where nothing is forgotten here, such as at a router that has just come: two
        sums cannot be told apart."""
        if self.forgotten.names:
            return
        self.forgotten = max(
            (report.forgotten_routers for report in reports), key=lambda item: len(item.names), default=self.forgotten
        )
        for router_id in self.forgotten.names:
            self._known.pop(router_id, None)

    def _forget_oldest(self) -> None:
        """Those that began first go, so that all routers remember the same ones and no total swings between them."""
        departed = [known.report for known in self._known.values() if known.state == "departed"]
        departed.sort(key=lambda report: (report.created_s, report.router_id))
        oldest = departed[:-MAX_DEPARTED]
        for report in oldest:
            del self._known[report.router_id]
        self.forgotten = self.forgotten.with_more(oldest)


def _departed(known: KnownRouter) -> KnownRouter:
    """The last word of a router that is gone, without whom it knew: whoever heard it knows them by now."""
    report = replace(
        known.report, departed={}, forgotten={}, forgotten_routers=ForgottenRouters(), arrivals=NO_ARRIVALS
    )
    return KnownRouter(report=report, state="departed")
