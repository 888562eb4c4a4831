"""What is known of each replica of one pool: its last report, what was sent there since, and whether it fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from engine.messages import LoadReport, WorkerInfo
from router.errors import NoReplicaError
from router.policies import Policy, make_policy
from router.pool_counters import PoolCounters
from router.settings import RouterSettings
from router.workers import ReplicaStatus, WorkerError, WorkerPool, WorkerUnavailableError

logger = logging.getLogger(f"baton.{__name__}")

STALLED = "its engine makes no step though it has work"

LATE_PERIODS = 1.5
"""Report periods without news after which a replica is asked; reports of healthy ones come a little late, too."""


@dataclass(slots=True, kw_only=True, eq=False)
class Replica:
    """One replica as this router sees it. Only the pool writes it.

    ``reserved_blocks`` and ``reserved_tokens`` belong to requests that were sent there and are not yet in its reports.
    """

    replica_id: str
    info: WorkerInfo | None = None
    load: LoadReport = field(default_factory=LoadReport)
    reported_at_s: float = 0.0
    reserved_blocks: int = 0
    reserved_tokens: int = 0
    num_reserved: int = 0
    num_failures: int = 0
    is_left_out: bool = False
    probe_at_s: float = 0.0

    @property
    def is_in_service(self) -> bool:
        """True when it introduced itself and does not fail."""
        return self.info is not None and not self.is_left_out

    @property
    def takes_requests(self) -> bool:
        """True when it is in service and not about to go."""
        return self.is_in_service and not self.load.is_draining

    @property
    def num_available_blocks(self) -> int:
        """Free blocks that nobody was promised."""
        return self.load.num_free_blocks - self.reserved_blocks

    @property
    def promised_usage(self) -> float:
        """Share of its KV blocks that is in use or promised; can exceed 1."""
        num_blocks = self.load.num_blocks
        return 1.0 - self.num_available_blocks / num_blocks if num_blocks else 1.0

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that wait to be computed there, those on their way included."""
        return self.load.queued_prefill_tokens + self.reserved_tokens

    @property
    def num_queued(self) -> int:
        """Requests that wait there or are on their way."""
        return self.load.num_waiting + self.load.num_loading + self.num_reserved

    @property
    def is_idle(self) -> bool:
        """True when nothing of anybody occupies it, as far as we know."""
        load = self.load
        return not (self.num_reserved or load.num_running or load.num_waiting or load.num_loading)


class Reservation:
    """Room on one replica for one request, until its own reports show the request. Released once, by whoever first."""

    __slots__ = ("_is_released", "_pool", "num_blocks", "num_tokens", "replica")

    def __init__(self, pool: ReplicaPool, replica: Replica, *, num_blocks: int, num_tokens: int) -> None:
        self._pool = pool
        self._is_released = False
        self.replica = replica
        self.num_blocks = num_blocks
        self.num_tokens = num_tokens
        replica.reserved_blocks += num_blocks
        replica.reserved_tokens += num_tokens
        replica.num_reserved += 1

    def release(self) -> None:
        """Give the room back. Idempotent."""
        if self._is_released:
            return
        self._is_released = True
        self.replica.reserved_blocks -= self.num_blocks
        self.replica.reserved_tokens -= self.num_tokens
        self.replica.num_reserved -= 1
        self._pool.notify()


class ReplicaPool:
    """The replicas of one role. Knows who can take a request; asks the workers only in ``refresh``."""

    def __init__(
        self,
        role: str,
        workers: WorkerPool,
        *,
        policy: str,
        settings: RouterSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.role = role
        self.workers = workers
        self.counters = PoolCounters()
        self.on_lost: Callable[[WorkerUnavailableError], None] = lambda _: None
        self._settings = settings
        self._clock = clock
        self._policy: Policy = make_policy(policy)
        self._replicas: dict[str, Replica] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """All known replicas, those left out included."""
        return tuple(self._replicas.values())

    def get(self, replica_id: str) -> Replica | None:
        """One replica, if it is known."""
        return self._replicas.get(replica_id)

    def has_introduced(self) -> bool:
        """True when at least one replica that takes requests introduced itself."""
        return any(replica.takes_requests for replica in self._replicas.values())

    def refresh(self) -> set[asyncio.Task[None]]:
        """Follow the membership, and start asking those replicas whose reports are missing or old.

        Returns:
            The questions on their way, older ones included. One silent replica delays no other one.
        """
        now = self._clock()
        current = set(self.workers.replica_ids())
        for replica_id in [known for known in self._replicas if known not in current]:
            logger.info("%s replica %s is gone", self.role, replica_id)
            del self._replicas[replica_id]
            self.notify()
        self.counters.keep(current)
        for replica_id in current.difference(self._replicas):
            self._replicas[replica_id] = Replica(replica_id=replica_id, probe_at_s=now)
        for replica in self.replicas:
            if replica.replica_id in self._asking:
                if replica.is_in_service and self.age_s(replica) >= self._settings.unresponsive_after_s:
                    self._declare_lost(replica, f"silent for {self.age_s(replica):.1f} s")
            elif self._wants_asking(replica, now):
                self._asking[replica.replica_id] = asyncio.create_task(self._ask(replica))
        return set(self._asking.values())

    async def close(self) -> None:
        """Stop asking."""
        tasks = tuple(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def choose(self, *, num_blocks: int = 0, exclude: Collection[str] = (), must_fit: bool = False) -> Replica | None:
        """The replica that should take a request, by the pool's policy.

        Replicas with fresh reports are preferred to those with stale ones. With ``must_fit`` only those that have room
        for ``num_blocks`` count, or that are idle, so that a wrong report cannot keep a request waiting for ever.
        """
        fresh, stale = self._candidates(exclude)
        candidates = fresh or stale
        if must_fit:
            candidates = [item for item in candidates if item.num_available_blocks >= num_blocks or item.is_idle]
        if not candidates:
            return None
        return candidates[0] if len(candidates) == 1 else self._policy(candidates)

    async def choose_or_wait(self, tried: Collection[str], *, is_retry: bool) -> Replica:
        """A replica for a request, if possible one that it has not tried.

        A request that lost a replica waits a while for another, or for the lost one to come back; a new one does not.

        Raises:
            NoReplicaError: There is none.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.recovery_wait_s):
                while True:
                    replica = self.choose(exclude=tried) or self.choose()
                    if replica is not None:
                        return replica
                    if not is_retry:
                        break
                    await self.wait_for_change()
        waited = f"none came back within {self._settings.recovery_wait_s:g} s" if is_retry else ""
        raise NoReplicaError(role=self.role, retry_after_s=self._settings.retry_after_s, reason=waited)

    def is_usable(self, replica: Replica) -> bool:
        """True when the replica is still there, not left out and not about to go."""
        is_there = self._replicas.get(replica.replica_id) is replica
        return is_there and not replica.is_left_out and not replica.load.is_draining

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens, by the block size that the replicas report."""
        info = next((replica.info for replica in self._replicas.values() if replica.info is not None), None)
        return -(-num_tokens // info.block_size) if info is not None else 0

    def reserve(self, replica: Replica, *, num_blocks: int = 0, num_tokens: int = 0) -> Reservation:
        """Promise room on a replica to a request."""
        return Reservation(self, replica, num_blocks=num_blocks, num_tokens=num_tokens)

    def has_any(self, exclude: Collection[str] = ()) -> bool:
        """True when some replica could be tried at all."""
        fresh, stale = self._candidates(exclude)
        return bool(fresh or stale)

    def note_load(self, replica_id: str, load: LoadReport) -> None:
        """Take a report that came with a message."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            replica.load = load
            replica.reported_at_s = self._clock()
            if replica.info is not None:
                self.counters.note(replica_id, replica.info.incarnation, load.counters)
            self.notify()

    def note_failure(self, replica_id: str, reason: str) -> None:
        """Leave a replica out until a probe succeeds; each failure in a row doubles the wait."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return
        backoff_s = min(self._settings.backoff_min_s * 2**replica.num_failures, self._settings.backoff_max_s)
        if not replica.is_left_out:
            logger.warning("%s replica %s is left out: %s", self.role, replica_id, reason)
        replica.num_failures = min(replica.num_failures + 1, 32)
        replica.is_left_out = True
        replica.probe_at_s = self._clock() + backoff_s
        self.notify()

    def notify(self) -> None:
        """Wake whoever waits for room or for a replica."""
        self._changed.set()

    async def wait_for_change(self) -> None:
        """Return after the next change of load, reservations or membership."""
        self._changed.clear()
        await self._changed.wait()

    def age_s(self, replica: Replica) -> float:
        """Seconds since the replica's last report."""
        return self._clock() - replica.reported_at_s

    def _candidates(self, exclude: Collection[str]) -> tuple[list[Replica], list[Replica]]:
        limit = self._clock() - self._settings.stale_after_s
        fresh: list[Replica] = []
        stale: list[Replica] = []
        for replica in self._replicas.values():
            if not replica.takes_requests or replica.replica_id in exclude:
                continue
            (fresh if replica.reported_at_s >= limit else stale).append(replica)
        return fresh, stale

    def _wants_asking(self, replica: Replica, now: float) -> bool:
        if replica.is_left_out or replica.info is None:
            return now >= replica.probe_at_s
        return now - replica.reported_at_s >= LATE_PERIODS * self._settings.report_period_s

    async def _ask(self, replica: Replica) -> None:
        timeout_s = self._settings.status_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                status = await self.workers.status(replica.replica_id, timeout_s=timeout_s)
        except (WorkerError, TimeoutError) as error:
            if not replica.is_in_service:
                self.note_failure(replica.replica_id, str(error) or "no answer to a probe")
            return
        finally:
            self._asking.pop(replica.replica_id, None)
        self._take_status(replica, status)

    def _declare_lost(self, replica: Replica, reason: str) -> None:
        """It neither reports nor answers, or its engine hangs: whoever waits for it waits in vain."""
        self.note_failure(replica.replica_id, reason)
        self.on_lost(WorkerUnavailableError(replica_id=replica.replica_id, reason=reason))

    def _take_status(self, replica: Replica, status: ReplicaStatus) -> None:
        if status.info is None:
            return
        if status.load is not None and status.load.is_stalled:
            replica.info = status.info
            self._declare_lost(replica, STALLED)
            return
        if replica.info is None or replica.is_left_out:
            logger.info("%s replica %s is in service", self.role, replica.replica_id)
        replica.info = status.info
        replica.is_left_out = False
        replica.num_failures = 0
        replica.load = status.load or LoadReport(
            num_blocks=status.info.num_blocks, num_free_blocks=status.info.num_blocks
        )
        replica.reported_at_s = self._clock()
        self.counters.note(replica.replica_id, status.info.incarnation, replica.load.counters)
        self.notify()
