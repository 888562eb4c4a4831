"""An operator's orders to the workers of a running cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.contract.messages import CacheReset
from engine.contract.role import Work
from kv_transfer.fault_options import FaultOptions
from router.balance.rebalancer import Rebalancer
from router.errors import InvalidRequestError, NoReplicaError, UnknownReplicaError
from router.pool.replica import Replica
from router.pool.role_view import RoleReplicas
from router.pool.workers import WorkerError, WorkerRefusedError
from router.roles import role_for


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetAnswer:
    """A worker's answer to an order to reset its prefix cache: what was ``dropped``, or why nothing was.

    ``is_busy``: an order that preempts its requests first would succeed.
    """

    replica_id: str
    role: str
    dropped: CacheReset | None = None
    is_busy: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveAnswer:
    """The worker that a number of live requests were told to leave, and their target; None leaves it to the policy."""

    source: str
    target: str | None
    num_streams: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaningAnswer:
    """The worker with a new leaning, and its leaning before."""

    replica_id: str
    before: str


class Administration:
    """Gives orders to workers, by the names that ``/status`` shows."""

    def __init__(
        self,
        pools: Sequence[RoleReplicas],
        rebalancer: Rebalancer,
        *,
        timeout_s: float,
        on_leaned: Callable[[str], None],
        is_elastic: bool = False,
    ) -> None:
        """``on_leaned`` is called with each worker whose leaning was ordered here."""
        self._pools = tuple(pools)
        self._rebalancer = rebalancer
        self._is_elastic = is_elastic
        self._on_leaned = on_leaned
        self._timeout_s = timeout_s

    async def drain(self, name: str) -> str:
        """Have a worker release its requests, and exit.

        Returns:
            The worker's whole id.

        Raises:
            UnknownReplicaError: No worker's id begins like this, or several do.
            NoReplicaError: It does not answer.
        """
        pool, replica = self._find(name)
        try:
            async with asyncio.timeout(self._timeout_s):
                await pool.workers.drain(replica.replica_id)
        except (WorkerError, TimeoutError) as error:
            raise NoReplicaError(role=pool.role, retry_after_s=1.0, reason=f"{replica.replica_id}: {error}") from error
        return replica.replica_id

    async def move(self, name: str, target: str | None, *, num_streams: int) -> MoveAnswer:
        """Have live requests of this router leave a worker, with their KV, and continue at another one.

        Raises:
            InvalidRequestError: The target does not generate, or is the same worker.
            UnknownReplicaError: No worker's id begins with one of the names, or several do.
            NoReplicaError: It does not answer.
        """
        pool, source = self._find(name)
        wanted = None if target is None else self._find(target, param="to")[1].replica_id
        if wanted == source.replica_id:
            raise InvalidRequestError(
                f"the streams are on {wanted} already: name another worker in 'to', or leave it out",
                code="same_replica",
                param="to",
            )
        if wanted is not None and not self._rebalancer.knows(wanted):
            raise InvalidRequestError(
                f"{wanted} only computes prompts, because roles are fixed: name a {role_for(Work.STREAM).name} worker "
                "in 'to', or leave it out",
                code="wrong_role",
                param="to",
            )
        try:
            number = await self._rebalancer.move(source.replica_id, wanted, num_streams=num_streams)
        except (WorkerError, TimeoutError) as error:
            raise NoReplicaError(role=pool.role, retry_after_s=1.0, reason=f"{source.replica_id}: {error}") from error
        return MoveAnswer(source=source.replica_id, target=wanted, num_streams=number)

    async def lean(self, name: str, role: str) -> LeaningAnswer:
        """Have a worker prefer the work of a role from now on; what runs there goes on.

        Raises:
            InvalidRequestError: The cluster's roles are fixed.
            UnknownReplicaError: No worker's id begins like this, or several do.
            NoReplicaError: It does not answer.
        """
        if not self._is_elastic:
            raise InvalidRequestError(
                "workers cannot change the role that they prefer, because this cluster has roles: fixed; configure "
                "roles: elastic to allow it",
                code="roles_are_fixed",
            )
        pool, replica = self._find(name)
        try:
            async with asyncio.timeout(self._timeout_s):
                before = await pool.workers.lean(replica.replica_id, role)
            replica.note_leaning(role)
            self._on_leaned(replica.replica_id)
        except (WorkerError, TimeoutError) as error:
            raise NoReplicaError(role=pool.role, retry_after_s=1.0, reason=f"{replica.replica_id}: {error}") from error
        return LeaningAnswer(replica_id=replica.replica_id, before=before)

    async def set_faults(self, options: FaultOptions, *, role: str | None, name: str | None = None) -> list[str]:
        """Inject exactly these faults into the connectors of all workers, of one role's, or of the one called ``name``.

        Returns:
            The ids of these workers.

        Raises:
            InvalidRequestError: The cluster allows no faults, or both a role and a name are given.
            UnknownReplicaError: No worker's id begins like this, or several do.
            NoReplicaError: A worker does not answer; the others have the faults already.
        """
        if name is not None and role is not None:
            raise InvalidRequestError(
                f"faults are for the workers of role {role} or for worker {name}: leave one of them out",
                code="invalid_parameter",
                param="replica",
            )
        if name is not None:
            targets = [self._find(name)]
        else:
            targets = [
                (pool, replica) for pool in self._pools if role in (None, pool.role) for replica in pool.replicas
            ]
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.gather(*(pool.workers.set_faults(item.replica_id, options) for pool, item in targets))
        except WorkerRefusedError as error:
            raise InvalidRequestError(str(error), code=error.code) from error
        except (WorkerError, TimeoutError) as error:
            roles = dict.fromkeys(pool.role for pool, _ in targets)
            raise NoReplicaError(role=" or ".join(roles), retry_after_s=1.0, reason=str(error)) from error
        return sorted(replica.replica_id for _, replica in targets)

    async def reset_prefix_cache(self, *, preempt_running: bool) -> list[ResetAnswer]:
        """Have every worker drop its prefix cache, and clear this router's mirror of the caches.

        Other routers learn of it from the workers, with the next report.
        """
        targets = [(pool, replica_id) for pool in self._pools for replica_id in sorted(pool.workers.replica_ids())]
        return await asyncio.gather(*(self._reset(pool, name, preempt_running) for pool, name in targets))

    async def _reset(self, pool: RoleReplicas, replica_id: str, preempt_running: bool) -> ResetAnswer:
        try:
            async with asyncio.timeout(self._timeout_s):
                dropped = await pool.workers.reset_prefix_cache(replica_id, preempt_running=preempt_running)
        except (WorkerError, TimeoutError) as error:
            reason = str(error) or f"worker {replica_id} did not answer within {self._timeout_s:g} s"
            return ResetAnswer(replica_id=replica_id, role=pool.role, reason=reason)
        if dropped is None:
            reason = "it has requests that hold KV blocks: wait for their end, or set preempt_running"
            return ResetAnswer(replica_id=replica_id, role=pool.role, is_busy=True, reason=reason)
        pool.forget_cache(replica_id)
        return ResetAnswer(replica_id=replica_id, role=pool.role, dropped=dropped)

    def _find(self, name: str, *, param: str = "replica") -> tuple[RoleReplicas, Replica]:
        found = [
            (pool, replica)
            for pool in self._pools
            for replica in pool.replicas
            if name and replica.replica_id.startswith(name)
        ]
        if len(found) != 1:
            known = [replica.replica_id for pool in self._pools for replica in pool.replicas]
            raise UnknownReplicaError(name=name, num_found=len(found), known=known, param=param)
        return found[0]
