"""How workers meet: one calls the replica whose id is the peer's engine id, before the connection is needed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from cluster.serve.refusal import HandshakeRefusal
from cluster.serve.replica_caller import Caller
from engine.contract.messages import LoadReport
from kv_transfer.connector import PeerDirectory
from kv_transfer.errors import PeerUnreachableError
from kv_transfer.params import Hello
from router.pool.workers import WorkerUnavailableError

LOOKUP_PERIOD_S = 0.05


class ServeRendezvous:
    """Implements ``kv_transfer.connector.Rendezvous`` over Serve: it reaches any worker of the given deployments.

    An engine's id is its Serve replica id, so no directory is needed. Calls run on the replica's event loop, while the
    connector's thread waits for them.
    """

    def __init__(self, callers: Sequence[Caller], *, loop: asyncio.AbstractEventLoop) -> None:
        self._callers = tuple(callers)
        self._loop = loop

    def connect(self) -> None:
        """Begin to follow the lists of replicas. Call it on the event loop."""
        for caller in self._callers:
            caller.connect()

    def meet(self, engine_id: str, hello: Hello, *, timeout_s: float) -> Hello:
        """Carry our hello to a peer and bring back its own.

        Raises:
            PeerUnreachableError: There is no such engine, or it did not answer in time.
            HandshakeRefusedError: The peer refused us.
        """
        future = asyncio.run_coroutine_threadsafe(self._meet(engine_id, hello, timeout_s=timeout_s), self._loop)
        try:
            # The coroutine keeps the deadline itself; this timeout is for an event loop that is stuck.
            answer = future.result(timeout_s + 1.0)
        except concurrent.futures.TimeoutError as error:
            future.cancel()
            raise PeerUnreachableError(engine_id=engine_id, reason=f"no answer within {timeout_s:g} s") from error
        except WorkerUnavailableError as error:
            raise PeerUnreachableError(engine_id=engine_id, reason=error.reason) from error
        if isinstance(answer, HandshakeRefusal):
            raise answer.to_error()
        return answer

    async def _meet(self, engine_id: str, hello: Hello, *, timeout_s: float) -> Hello | HandshakeRefusal:
        deadline_s = self._loop.time() + timeout_s
        caller = await self._caller_of(engine_id, deadline_s=deadline_s)
        answer: Any = await caller.call(
            engine_id, "handshake", hello, timeout_s=max(deadline_s - self._loop.time(), LOOKUP_PERIOD_S)
        )
        if not isinstance(answer, (Hello, HandshakeRefusal)):
            raise PeerUnreachableError(engine_id=engine_id, reason=f"answered with a {type(answer).__name__}")
        return answer

    async def _caller_of(self, engine_id: str, *, deadline_s: float) -> Caller:
        """Find the deployment that has this replica. Waits, since a replica that just started may not be known yet."""
        while True:
            for caller in self._callers:
                if engine_id in caller.replica_ids():
                    return caller
            if self._loop.time() + LOOKUP_PERIOD_S > deadline_s:
                raise WorkerUnavailableError(replica_id=engine_id, reason="no running replica has this id")
            await asyncio.sleep(LOOKUP_PERIOD_S)


logger = logging.getLogger(f"baton.{__name__}")

LOOK_PERIOD_S = 0.2
TURN_S = 2.0
"""Of two workers, the one with the smaller id begins the handshake; the other one begins only after this time."""

FORGET_AFTER_S = 300.0
"""When to forget a worker that is no longer listed: later than any drain may take."""

ABSENT_AFTER_S = 0.5
ASK_TIMEOUT_S = 2.0
FIRST_LISTS_S = 0.5


class Introductions:
    """The peers of one worker: all workers of the roles to which it hands KV over, or from which it gets KV."""

    def __init__(
        self,
        *,
        own_id: str,
        own: Caller,
        others: Sequence[Caller],
        meets_own_role: bool,
        taking_over: Sequence[Caller] = (),
        peers: PeerDirectory,
        on_met: Callable[[int], None],
        on_absent: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``taking_over``: those of the others whose workers can also take over the requests of this worker."""
        self._own_id = own_id
        self._own = own
        self._others = tuple(others)
        self._alike = (own, *taking_over)
        self._meets_own_role = meets_own_role
        self._peers = peers
        self._on_met = on_met
        self._on_absent = on_absent
        self._clock = clock
        self._seen_at_s: dict[str, float] = {}
        self._known_since_s: dict[str, float] = {}
        self._met_once: set[str] = set()
        self._had_siblings = False
        self._was_listed = False
        self._absent_since_s: float | None = None

    def siblings(self) -> set[str]:
        """The other running workers that can do our work: those of our role, and of the others if they take over."""
        return {replica_id for caller in self._alike for replica_id in caller.replica_ids()} - {self._own_id}

    async def takers(self) -> set[str]:
        """The siblings that take requests now: they answer, make progress, and are not draining."""
        return {replica_id for replica_id, load in (await self._ask_siblings()).items() if _takes_requests(load)}

    async def may_leave(self) -> bool:
        """True when it is our turn to leave. Workers leave one at a time, in the order of their ids, and only while a
        sibling can take their requests, unless there never was a sibling."""
        loads = await self._ask_siblings()
        if any(load.is_draining for load in loads.values()):
            return False
        if any(load.has_hung_read and replica_id < self._own_id for replica_id, load in loads.items()):
            return False
        return not self._had_siblings or any(_takes_requests(load) for load in loads.values())

    async def _ask_siblings(self) -> dict[str, LoadReport]:
        """The loads of the siblings that answer."""
        siblings = sorted(self.siblings())
        loads = await asyncio.gather(*(self._load_of(replica_id) for replica_id in siblings))
        return {replica_id: load for replica_id, load in zip(siblings, loads, strict=True) if load is not None}

    async def _load_of(self, replica_id: str) -> LoadReport | None:
        caller = next((item for item in self._alike if replica_id in item.replica_ids()), self._own)
        try:
            _, load = await caller.call(replica_id, "status", timeout_s=ASK_TIMEOUT_S)
        except WorkerUnavailableError as error:
            logger.info("another worker of this pool does not answer: %s", error)
            return None
        assert isinstance(load, LoadReport)
        return load

    async def keep_looking(self) -> None:
        """Follow the workers that start and end, until cancelled."""
        while True:
            try:
                self.look()
            except Exception:
                # Serve's list of replicas is private to Serve: an error in it must not end this loop.
                logger.exception("searching for peers failed")
            await asyncio.sleep(LOOK_PERIOD_S)

    async def meet_all(self, *, timeout_s: float) -> None:
        """Meet all workers that run already. A worker that does not answer in time is met later, or never."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait_for_lists()
                while self._peers.has_room and (missing := self._wanted() - self._peers.ids):
                    for engine_id in missing:
                        self._peers.greet(engine_id)
                    await asyncio.sleep(LOOK_PERIOD_S / 4)
        except TimeoutError:
            logger.warning(
                "not connected within %g s: %s", timeout_s, ", ".join(sorted(self._wanted() - self._peers.ids))
            )
        except Exception:
            # Log it and go on: a worker that never becomes healthy could not say why. ``keep_looking`` tries again.
            logger.exception("connecting to the other workers failed")
            return
        self._tell_met(self._peers.ids)

    async def _wait_for_lists(self) -> None:
        """Wait for Serve's lists of replicas, which arrive a moment later; in a starting cluster they stay empty."""
        deadline_s = self._clock() + FIRST_LISTS_S
        while not (self._own.replica_ids() or self._ids_of_others()) and self._clock() < deadline_s:  # noqa: ASYNC110 (lists of Serve, without events)
            await asyncio.sleep(LOOK_PERIOD_S / 4)

    def look(self) -> None:
        """Greet new workers, forget those long gone, and notice when Serve no longer lists this worker."""
        now = self._clock()
        wanted, met = self._wanted(), self._peers.ids
        self._had_siblings = self._had_siblings or bool(self.siblings())
        self._seen_at_s.update(dict.fromkeys(wanted, now))
        for engine_id in wanted - met if self._peers.has_room else ():
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
        """Report how many running workers of other roles were met at least once; idle ones may reconnect any time."""
        listed = self._ids_of_others()
        self._met_once = (self._met_once | met) & listed
        self._on_met(len(self._met_once))

    def _wanted(self) -> set[str]:
        return self._ids_of_others() | (self.siblings() if self._meets_own_role else set())

    def _ids_of_others(self) -> set[str]:
        """The running workers of other roles that we meet."""
        return {replica_id for caller in self._others for replica_id in caller.replica_ids()}

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


def _takes_requests(load: LoadReport) -> bool:
    return not (load.is_draining or load.is_stalled)
