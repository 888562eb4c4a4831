"""Lets pools grow and shrink as the promises need it; one of the live routers decides for all."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from router.balance.leanings import leads
from router.pool.role_view import RoleReplicas
from router.pool.workers import WorkerError
from router.report.arrivals import ArrivalSample
from router.report.counters import RouterCounters
from router.report.router_report import ScalingNote
from router.scaling.group import Group, Look, groups_of
from router.scaling_rules import ScalingRules
from router.settings import RouterSettings

NEW_WEIGHT = 0.5
"""Weight of the last start in the moving average."""

LONGEST_S = 3600.0

PERIOD_S = 1.0
"""Period between two looks at the load."""


class StartTimes:
    """Measures how long workers of one pool take to start: new workers are taken to be the ones ordered last."""

    def __init__(self, expected_s: float) -> None:
        self.expected_s = expected_s
        self._is_measured = False
        self._known: frozenset[str] | None = None
        self._ordered_s: deque[float] = deque()

    def order(self, number: int, now_s: float) -> None:
        """Note an order for ``number`` more workers; a negative number takes orders back."""
        if number > 0:
            self._ordered_s.extend([now_s] * number)
        for _ in range(min(-number, len(self._ordered_s))):
            self._ordered_s.pop()

    def see(self, replica_ids: Collection[str], now_s: float) -> None:
        """Note which workers take requests now, and measure the starts of new ones."""
        known, self._known = self._known, frozenset(replica_ids)
        if known is None:
            return
        for _ in self._known - known:
            if self._ordered_s:
                self._take(min(now_s - self._ordered_s.popleft(), LONGEST_S))

    def _take(self, seconds: float) -> None:
        weight = NEW_WEIGHT if self._is_measured else 1.0
        self.expected_s += weight * (seconds - self.expected_s)
        self._is_measured = True


logger = logging.getLogger(f"baton.{__name__}")


class ScalingOrders(Protocol):
    """Orders workers to start and stop."""

    async def want(self, role: str, number: int) -> None:
        """Set a role's number of workers; they are started or drained over time. Repeating an order does nothing.

        Raises:
            WorkerUnavailableError: The order cannot be given now.
        """


class ScalingBoard(Protocol):
    """What routers tell each other (:class:`router.report.cluster_view.ClusterView`)."""

    def live_router_ids(self) -> Collection[str]:
        """Ids of this router and of the other live ones."""

    def arrivals(self) -> Sequence[ArrivalSample]:
        """The recent requests of this router, and of the others by their last reports."""

    def note_scaling(self, note: ScalingNote) -> None:
        """Record a change that this router ordered."""

    def last_scaling(self, role: str) -> ScalingNote | None:
        """The last change of a pool's size, whichever router ordered it."""


class ScalingControl:
    """Looks every second, and orders changes if its router leads.

    It decides by the workers' reports and by what routers tell each other. So when the leader dies, the next one begins
    with the sizes that were ordered last, and holds them as long as if it had ordered them.
    """

    def __init__(
        self,
        pools: Sequence[RoleReplicas],
        *,
        view: ScalingBoard,
        own_id: str,
        settings: RouterSettings,
        counters: RouterCounters,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.orders: ScalingOrders | None = None
        self._pools = {pool.role: pool for pool in pools}
        self._view = view
        self._own_id = own_id
        self._settings = settings
        self._rules = settings.scaling or ScalingRules(pools={})
        self._counters = counters
        self._clock = clock
        self._wall_clock = wall_clock
        self._starts = {role: StartTimes(self._rules.start_s) for role in self._rules.pools}
        self._groups: Sequence[Group] | None = None
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look, if pools follow the promises. Idempotent."""
        if self._rules.pools and self.orders is not None and self._looking is None:
            self._looking = asyncio.create_task(self._keep_looking())

    async def close(self) -> None:
        """Order nothing more. Idempotent."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
            self._looking = None

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                await self.look()
            except Exception:
                logger.exception("checking the sizes of the pools failed")

    async def look(self) -> Sequence[ScalingNote]:
        """If this router leads, order the changes that are due, and repeat the orders given before."""
        now_s = self._clock()
        for role, starts in self._starts.items():
            starts.see(self._serving(role), now_s)
        if not leads(self._own_id, self._view.live_router_ids()):
            self._groups = None
            return ()
        if self._groups is None:
            self._groups = groups_of(self._settings, self._sizes())
        self._adopt_sizes(self._groups)
        notes = [note for group in self._groups for note in self._changes(group, now_s)]
        for note in notes:
            self._starts[note.role].order(note.wanted - note.before, now_s)
            self._view.note_scaling(note)
            logger.info("scaling: role=%s wanted=%d before=%d: %s", note.role, note.wanted, note.before, note.reason)
        for group in self._groups:
            for role in self._rules.pools.keys() & group.wanted.keys():
                if self._view.last_scaling(role) is not None:  # otherwise the pool is still as it was deployed
                    await self._order(role, group.wanted[role])
        return notes

    def _changes(self, group: Group, now_s: float) -> list[ScalingNote]:
        horizon_s = PERIOD_S + max(self._starts[role].expected_s for role in group.wanted if role in self._starts)
        look = Look(
            now_s=now_s,
            horizon_s=horizon_s,
            samples=self._view.arrivals(),
            typical_output=self._counters.mean_output_tokens(),
            replicas={role: self._pools[role].replicas for role in group.wanted},
        )
        before = dict(group.wanted)
        reason = group.look(look)
        return [
            ScalingNote(role=role, wanted=number, before=before[role], reason=reason, changed_at_s=self._wall_clock())
            for role, number in group.wanted.items()
            if number != before[role]
        ]

    async def _order(self, role: str, number: int) -> None:
        assert self.orders is not None, "start() begins to look only where orders can be given"
        try:
            async with asyncio.timeout(self._settings.abort_timeout_s):
                await self.orders.want(role, number)
        except (WorkerError, TimeoutError) as error:
            logger.info("size not ordered: role=%s wanted=%d: %s", role, number, error)

    def _serving(self, role: str) -> list[str]:
        return [item.replica_id for item in self._pools[role].replicas if item.takes_requests]

    def _adopt_sizes(self, groups: Sequence[Group]) -> None:
        """Take over the current number of workers: for pools that do not follow the promises, always; for the others,
        only until the first order, and within their bounds: that is the number that they were deployed with.
        """
        for group in groups:
            for role, wanted in group.wanted.items():
                number, bounds = len(self._serving(role)), self._rules.pools.get(role)
                if bounds is None:
                    group.adopt(role, number)
                elif self._view.last_scaling(role) is None and wanted < bounds.clamp(number):
                    group.adopt(role, bounds.clamp(number))

    def _sizes(self) -> dict[str, int]:
        """Each pool's last ordered number of workers, or else its current number."""
        sizes: dict[str, int] = {}
        for role in self._pools:
            note = self._view.last_scaling(role)
            number = len(self._serving(role)) if note is None else note.wanted
            bounds = self._rules.pools.get(role)
            sizes[role] = number if bounds is None else bounds.clamp(number)
        return sizes
