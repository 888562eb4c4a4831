"""The state of each replica of a pool: its last report, what was sent there since, and whether it fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from engine.contract.messages import CacheChanges, LoadReport
from engine.contract.role import Role, Work
from router.errors import NoReplicaError
from router.placement.fleet import Fleet, Standings
from router.placement.machine_code import MACHINE_CODE
from router.policies import Ask
from router.policies.by_work import PoliciesByWork
from router.policies.session import home_of, is_overloaded
from router.pool.demand import Demand
from router.pool.pool_counters import PoolCounters
from router.pool.prefix_mirror import PrefixMirror
from router.pool.ready import ReadyReplicas
from router.pool.replica import Replica, Reservation
from router.pool.united_workers import UnitedWorkers
from router.pool.workers import ReplicaStatus, WorkerError, WorkerPool, WorkerUnavailableError
from router.settings import LATE_PERIODS, RouterSettings

logger = logging.getLogger(f"baton.{__name__}")

STALLED = "its engine has work but makes no steps"
NOTHING_CACHED: Mapping[str, int] = {}


class ReplicaPool:
    """The replicas of one role, or of all. Knows which can take a request; asks the workers only in ``refresh``."""

    def __init__(
        self,
        role: Role,
        workers: WorkerPool,
        *,
        policy: str,
        settings: RouterSettings,
        mirrors_cache: bool = False,
        clock: Callable[[], float] = time.monotonic,
        also: Mapping[Role, str] | None = None,
    ) -> None:
        """``also``: more roles that ``workers`` have, each with its policy; replicas then differ in their leaning."""
        self.policies = PoliciesByWork({role: policy, **(also or {})})
        self.workers = workers
        self.counters_of = {item.name: PoolCounters() for item in (role, *(also or ()))}
        self.role = " or ".join(self.counters_of)
        self.on_lost: Callable[[WorkerUnavailableError], None] = lambda _: None
        self._settings = settings
        self._chooses_by_role = bool(also) and not settings.is_elastic
        self._clock = clock
        self._fleet = Fleet() if also and settings.is_elastic else None
        self._slots: tuple[Sequence[Replica], npt.NDArray[np.intp]] = ((), np.empty(0, np.intp))
        self.mirror = PrefixMirror(settings.max_mirrored_blocks) if mirrors_cache else None
        self._replicas: dict[str, Replica] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._ready = ReadyReplicas(self._replicas, stale_after_s=settings.stale_after_s, clock=clock)

    @property
    def counters(self) -> PoolCounters:
        """The replicas' counters, in a pool of one role."""
        return next(iter(self.counters_of.values()))

    @property
    def is_united(self) -> bool:
        """True if the pool has replicas of several roles."""
        return len(self.counters_of) > 1

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """All known replicas, including those left out."""
        return tuple(self._replicas.values())

    def get(self, replica_id: str) -> Replica | None:
        """One replica, if it is known."""
        return self._replicas.get(replica_id)

    def has_introduced(self, role: str | None = None) -> bool:
        """True if a replica that takes requests has introduced itself; with ``role``, one started with that role."""
        return any(item.takes_requests and role in (None, item.role) for item in self._replicas.values())

    def refresh(self) -> set[asyncio.Task[None]]:
        """Update the membership, and start asking replicas whose reports are missing or old.

        Returns:
            The tasks that ask, including earlier ones. A silent replica does not delay the others.
        """
        now = self._clock()
        current = set(self.workers.replica_ids())
        for replica_id in [known for known in self._replicas if known not in current]:
            self.note_gone(replica_id)
        for counters in self.counters_of.values():
            counters.keep(current)
        for replica_id in sorted(current.difference(self._replicas)):
            self._add(Replica(replica_id, role=self._role_of(replica_id), probe_at_s=now))
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

    def choose(
        self,
        demand: Demand,
        *,
        work: Work | None = None,
        num_blocks: int = 0,
        exclude: Collection[str] = (),
        must_fit: bool = False,
    ) -> Replica | None:
        """The replica that should take a request: its session's, or the policy's choice.

        Replicas with fresh reports are preferred to those with stale ones. With ``must_fit``, only replicas with room
        for ``num_blocks`` count, and idle ones, so that a wrong report cannot keep a request waiting forever.
        In a pool of several roles, replicas that lean to the kind of ``work`` are preferred to the others.
        """
        work = work or self.policies.own_work
        candidates = self.candidates(exclude, work)
        if must_fit:
            candidates = [item for item in candidates if item.num_available_blocks >= num_blocks or item.is_idle]
        if self.is_united:
            candidates = [item for item in candidates if item.prefers(work)] or candidates
        if len(candidates) <= 1:
            return candidates[0] if candidates else None
        home = self.home(demand, candidates)
        if home is not None:
            return home
        cached = self.cached_tokens(demand) if self.policies.uses_cache else NOTHING_CACHED
        return self.policies[work](candidates, Ask(num_tokens=demand.num_tokens, cached_tokens=cached))

    def home(self, demand: Demand, candidates: Sequence[Replica]) -> Replica | None:
        """The replica of the request's session; None if it has no session, or the replica is overloaded."""
        if demand.session_id is None:
            return None
        home, settings = home_of(candidates, demand.session_id), self._settings
        usage_lead, queue_lead = settings.session_max_usage_lead, settings.session_max_queue_lead
        is_full = is_overloaded(home, candidates, max_usage_lead=usage_lead, max_queue_lead=queue_lead)
        return None if is_full else home

    def fewest_queued_tokens(self) -> int | None:
        """The fewest prompt tokens that wait at any replica; None if no replica takes prompts."""
        return min((item.queued_tokens for item in self.candidates(work=Work.PROMPT)), default=None)

    def num_cached_tokens(self, replica: Replica, demand: Demand) -> int:
        """How many tokens of a prompt a replica has in its prefix cache, as far as this router knows."""
        if self.mirror is None or not self.mirror.num_blocks:
            return 0
        block_size = self._block_size()
        return self.mirror.num_cached(replica.replica_id, demand.block_keys(block_size)) * block_size

    def cached_tokens(self, demand: Demand) -> Mapping[str, int]:
        """Roughly how many tokens of a prompt each replica has cached; replicas with none are left out."""
        if self.mirror is None or not self.mirror.num_blocks:
            return NOTHING_CACHED
        block_size = self._block_size()
        return self.mirror.cached_tokens(demand.block_keys(block_size), block_size)

    async def choose_or_wait(self, demand: Demand, tried: Collection[str] = (), work: Work | None = None) -> Replica:
        """A replica for an accepted request, if possible one that it has not tried.

        If there is none, wait for a new one, or for a lost one to come back.

        Raises:
            NoReplicaError: None came within ``recovery_wait_s``.
        """
        wait_s = self._settings.recovery_wait_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while True:
                    replica = self.choose(demand, work=work, exclude=tried) or self.choose(demand, work=work)
                    if replica is not None:
                        return replica
                    await self.wait_for_change()
        reason = f"none came back within {wait_s:g} s"
        raise NoReplicaError(role=self.role, retry_after_s=self._settings.retry_after_s, reason=reason)

    def is_usable(self, replica: Replica) -> bool:
        """True when the replica is still there, not left out and not about to go."""
        is_there = self._replicas.get(replica.replica_id) is replica
        return is_there and not replica.is_left_out and not replica.load.is_draining

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold ``num_tokens``, by the block size that the replicas report."""
        block_size = self._block_size()
        return -(-num_tokens // block_size) if block_size else 0

    def reserve(
        self, replica: Replica, *, num_blocks: int = 0, num_tokens: int = 0, generates: bool = True
    ) -> Reservation:
        """Reserve room on a replica for a request; without ``generates``, only its prompt is computed there."""
        num_rows = int(generates and num_blocks > 0)
        return Reservation(replica, num_blocks=num_blocks, num_tokens=num_tokens, num_rows=num_rows, notify=self.notify)

    def has_any(self, exclude: Collection[str] = (), work: Work | None = None) -> bool:
        """True if some replica could be tried at all; with ``work``, one that takes this kind."""
        return bool(self.candidates(exclude, work))

    def expects_any(self, work: Work | None = None) -> bool:
        """True if some replica could be tried, or a new one is about to give its first report.

        During an update the last known replica may go just while its successor is being asked.
        """
        return self.has_any(work=work) or any(map(self._has_just_come, self.workers.replica_ids()))

    def note_load(self, replica_id: str, load: LoadReport) -> None:
        """Take a report that came with a message."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            now_s = self._clock()
            was_candidate = replica.takes_requests and replica.reported_at_s >= now_s - self._settings.stale_after_s
            had_stream, replica.has_stream = replica.has_stream, True
            replica.report(load, now_s)
            if not had_stream or was_candidate is not replica.takes_requests:
                self._ready.forget()
            if replica.info is not None:
                self.counters_of[replica.role].note(replica_id, replica.info.incarnation, load.counters)
            self.notify()

    def note_stream_end(self, replica_id: str) -> None:
        """The token stream of a replica ended; ``note_load`` shows the next one."""
        replica = self._replicas.get(replica_id)
        if replica is not None and replica.has_stream:
            replica.has_stream = False
            self._ready.forget()

    def note_cache(self, replica_id: str, changes: Iterable[CacheChanges]) -> bool:
        """Apply changes of a replica's prefix cache; False if earlier ones are missing."""
        mirror = self.mirror
        if mirror is None or replica_id not in self._replicas:
            return True
        return all(mirror.apply(replica_id, item) for item in changes)

    def forget_cache(self, replica_id: str) -> None:
        """Forget everything that a replica has cached."""
        if self.mirror is not None:
            self.mirror.forget(replica_id)

    def note_draining(self, replica_id: str) -> None:
        """A replica refused a request because it drains: send no more, without waiting for its next report."""
        replica = self._replicas.get(replica_id)
        if replica is not None and not replica.load.is_draining:
            replica.load = replace(replica.load, is_draining=True)
            replica.update()
            self._ready.forget()
            self.notify()

    def note_gone(self, replica_id: str) -> None:
        """Drop a replica that is gone; if it is there after all, the next ``refresh`` asks it again."""
        replica = self._replicas.pop(replica_id, None)
        if replica is not None:
            logger.info("%s replica %s is gone", replica.role, replica_id)
            if self._fleet is not None:
                replica.fleet = None  # its remaining reservations must not write to the slot's next replica
                self._fleet.give_back(replica.slot)
            self._ready.forget()
            self.forget_cache(replica_id)
            self.notify()

    def note_failure(self, replica_id: str, reason: str) -> None:
        """Leave a replica out until a probe succeeds; each failed probe doubles the wait.

        One fault ends many requests, and each of them reports it; these reports are ignored until the next probe.
        """
        replica = self._replicas.get(replica_id)
        if replica is None or (replica.is_left_out and self._clock() < replica.probe_at_s):
            return
        backoff_s = min(self._settings.backoff_min_s * 2**replica.num_failures, self._settings.backoff_max_s)
        if not replica.is_left_out:
            logger.warning("%s replica %s is left out: %s", replica.role, replica_id, reason)
        replica.num_failures = min(replica.num_failures + 1, 32)
        replica.is_left_out = True
        replica.probe_at_s = self._clock() + backoff_s
        replica.update()
        self._ready.forget()
        self.notify()

    def notify(self) -> None:
        """Wake all that wait for room or for a replica."""
        self._changed.set()

    async def wait_for_change(self) -> None:
        """Return after the next change of load, reservations or membership."""
        self._changed.clear()
        await self._changed.wait()

    def age_s(self, replica: Replica) -> float:
        """Seconds since the replica's last report."""
        return self._clock() - replica.reported_at_s

    def that_take(self, work: Work) -> tuple[Replica, ...]:
        """All known replicas that do this kind of work: in a pool of fixed roles, those whose role is for it."""
        return tuple(self._able(self._replicas.values(), work))

    def candidates(self, exclude: Collection[str] = (), work: Work | None = None) -> list[Replica]:
        """The replicas that are ready for requests; if there are none, the ones in service with stale reports."""
        ready = self._ready.now()
        if work is not None and self._chooses_by_role:
            ready = self._able(ready, work)
        if exclude:
            ready = [item for item in ready if item.replica_id not in exclude]
        if ready:
            return ready
        others = [item for item in self._replicas.values() if item.takes_requests and item.replica_id not in exclude]
        return others if work is None else self._able(others, work)

    def standings(self, replicas: Sequence[Replica]) -> Standings:
        """The state of replicas for placement, in a pool of several roles; the caller may change it."""
        assert self._fleet is not None, "pools of one role choose by their policies"
        if not MACHINE_CODE.is_for(len(replicas)):
            return self._fleet.standings([item.slot for item in replicas])
        known, slots = self._slots
        if known is not replicas:
            slots = np.array([item.slot for item in replicas], np.intp)
            self._slots = (replicas, slots)
        return self._fleet.standings_as_arrays(slots)

    def _able(self, replicas: Iterable[Replica], work: Work) -> list[Replica]:
        return [item for item in replicas if not self._chooses_by_role or item.prefers(work)]

    def _add(self, replica: Replica) -> None:
        self._replicas[replica.replica_id] = replica
        if self._fleet is not None:
            replica.fleet, replica.slot = self._fleet, self._fleet.take_slot()
            replica.update()

    def _role_of(self, replica_id: str) -> str:
        return self.workers.role_of(replica_id) if isinstance(self.workers, UnitedWorkers) else self.role

    def _has_just_come(self, replica_id: str) -> bool:
        replica = self._replicas.get(replica_id)
        return replica is None or (replica.info is None and not replica.is_left_out)

    def _block_size(self) -> int:
        return next((item.info.block_size for item in self._replicas.values() if item.info is not None), 0)

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
        """Mark a silent or hung replica as lost, so that nothing waits for it in vain."""
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
            logger.info("%s replica %s is in service", replica.role, replica.replica_id)
        replica.info = status.info
        replica.is_left_out = False
        replica.num_failures = 0
        replica.report(
            status.load or LoadReport(num_blocks=status.info.num_blocks, num_free_blocks=status.info.num_blocks),
            self._clock(),
        )
        self._ready.forget()
        self.counters_of[replica.role].note(replica.replica_id, status.info.incarnation, replica.load.counters)
        self.notify()
