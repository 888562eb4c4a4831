"""What an operator may do to the workers of a running cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kv_transfer.fault_options import FaultOptions
from router.errors import InvalidRequestError, NoReplicaError, UnknownReplicaError
from router.pool import ReplicaPool
from router.replica import Replica
from router.workers import WorkerError, WorkerRefusedError


class Administration:
    """Orders to workers, by the names that ``/status`` shows."""

    def __init__(self, pools: Sequence[ReplicaPool], *, timeout_s: float) -> None:
        self._pools = tuple(pools)
        self._timeout_s = timeout_s

    async def drain(self, name: str) -> str:
        """Have a worker let its requests go, and exit.

        Returns:
            Its whole id.

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

    async def set_faults(self, options: FaultOptions, *, role: str | None) -> list[str]:
        """Have the connectors of all workers, or of one role's, suffer these faults and no others.

        Returns:
            The ids of the workers that do.

        Raises:
            InvalidRequestError: The cluster allows no faults.
            NoReplicaError: A worker does not answer; the others suffer them already.
        """
        targets = [(pool, replica) for pool in self._pools if role in (None, pool.role) for replica in pool.replicas]
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.gather(*(pool.workers.set_faults(item.replica_id, options) for pool, item in targets))
        except WorkerRefusedError as error:
            raise InvalidRequestError(str(error), code=error.code) from error
        except (WorkerError, TimeoutError) as error:
            raise NoReplicaError(role=role or "prefill or decode", retry_after_s=1.0, reason=str(error)) from error
        return sorted(replica.replica_id for _, replica in targets)

    def _find(self, name: str) -> tuple[ReplicaPool, Replica]:
        found = [
            (pool, replica)
            for pool in self._pools
            for replica in pool.replicas
            if name and replica.replica_id.startswith(name)
        ]
        if len(found) != 1:
            known = [replica.replica_id for pool in self._pools for replica in pool.replicas]
            raise UnknownReplicaError(name=name, num_found=len(found), known=known)
        return found[0]
