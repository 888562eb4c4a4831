"""Workers meet before they are needed, and a worker learns from its absence that it is being stopped.

Who is met in advance can be read from at once, even after Serve has taken it off its list: a worker that is being
drained is reached no other way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from cluster.replica_caller import Caller
from kv_transfer.connector import PeerBook
from router.workers import WorkerUnavailableError

logger = logging.getLogger(f"baton.{__name__}")

LOOK_PERIOD_S = 0.2
TURN_S = 2.0
"""Of two workers that know each other, the one with the smaller id begins; the other one only after this time."""

FORGET_AFTER_S = 300.0
"""Longer than any worker may take to be drained."""

ABSENT_AFTER_S = 0.5
ASK_TIMEOUT_S = 2.0
FIRST_LISTS_S = 0.5


class Introductions:
    """One worker's acquaintances: all workers of the other role, and of its own where these hand requests over."""

    def __init__(
        self,
        *,
        own_id: str,
        own: Caller,
        other: Caller,
        meets_own_role: bool,
        peers: PeerBook,
        on_met: Callable[[int], None],
        on_absent: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own_id = own_id
        self._own = own
        self._other = other
        self._meets_own_role = meets_own_role
        self._peers = peers
        self._on_met = on_met
        self._on_absent = on_absent
        self._clock = clock
        self._seen_at_s: dict[str, float] = {}
        self._known_since_s: dict[str, float] = {}
        self._met_once: set[str] = set()
        self._was_listed = False
        self._absent_since_s: float | None = None

    def siblings(self) -> set[str]:
        """The other workers of our role that are running now."""
        return set(self._own.replica_ids()) - {self._own_id}

    async def takers(self) -> set[str]:
        """Those of them that take requests now: they answer, go on, and are not about to go themselves."""
        siblings = sorted(self.siblings())
        answers = await asyncio.gather(*(self._takes_requests(replica_id) for replica_id in siblings))
        return {replica_id for replica_id, takes in zip(siblings, answers, strict=True) if takes}

    async def _takes_requests(self, replica_id: str) -> bool:
        try:
            _, load = await self._own.call(replica_id, "status", timeout_s=ASK_TIMEOUT_S)
        except WorkerUnavailableError as error:
            logger.info("a sibling does not answer: %s", error)
            return False
        return not (load.is_draining or load.is_stalled)

    async def keep_looking(self) -> None:
        """Follow who comes and goes, until cancelled."""
        while True:
            try:
                self.look()
            except Exception:
                # Serve's list is private to it: whatever it does must not end the meetings.
                logger.exception("looking for peers failed")
            await asyncio.sleep(LOOK_PERIOD_S)

    async def meet_all(self, *, timeout_s: float) -> None:
        """Meet everybody who is there already; those that do not answer in time are met later, or never."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait_for_lists()
                while missing := self._wanted() - self._peers.ids:
                    for engine_id in missing:
                        self._peers.greet(engine_id)
                    await asyncio.sleep(LOOK_PERIOD_S / 4)
        except TimeoutError:
            logger.warning("not met within %g s: %s", timeout_s, ", ".join(sorted(self._wanted() - self._peers.ids)))
        except Exception:
            # A worker that never counted as healthy would not say why; ``keep_looking`` tries again.
            logger.exception("meeting the other workers failed")
            return
        self._tell_met(self._peers.ids)

    async def _wait_for_lists(self) -> None:
        """Serve sends its lists a moment after they were asked for; in a cluster that starts they stay empty."""
        deadline_s = self._clock() + FIRST_LISTS_S
        while not (self._own.replica_ids() or self._other.replica_ids()) and self._clock() < deadline_s:  # noqa: ASYNC110 (lists of Serve, without events)
            await asyncio.sleep(LOOK_PERIOD_S / 4)

    def look(self) -> None:
        """Greet the new ones, forget those long gone, notice if we are gone ourselves."""
        now = self._clock()
        wanted, met = self._wanted(), self._peers.ids
        self._seen_at_s.update(dict.fromkeys(wanted, now))
        for engine_id in wanted - met:
            since_s = self._known_since_s.setdefault(engine_id, now)
            if self._own_id < engine_id or now - since_s >= TURN_S:
                self._peers.greet(engine_id)
        for engine_id in [name for name, seen_s in self._seen_at_s.items() if now - seen_s >= FORGET_AFTER_S]:
            del self._seen_at_s[engine_id]
            self._known_since_s.pop(engine_id, None)
            self._peers.forget(engine_id)
        self._tell_met(met)
        self._notice_absence(now)

    def _tell_met(self, met: frozenset[str]) -> None:
        """Count who of the other role is there and was met once: an idle connection may be made anew at any time."""
        listed = set(self._other.replica_ids())
        self._met_once = (self._met_once | met) & listed
        self._on_met(len(self._met_once))

    def _wanted(self) -> set[str]:
        return set(self._other.replica_ids()) | (self.siblings() if self._meets_own_role else set())

    def _notice_absence(self, now: float) -> None:
        if self._own_id in self._own.replica_ids():
            self._was_listed = True
            self._absent_since_s = None
        elif self._was_listed:
            if self._absent_since_s is None:
                self._absent_since_s = now
            elif now - self._absent_since_s >= ABSENT_AFTER_S:
                self._was_listed = False
                self._on_absent()
