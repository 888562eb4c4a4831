"""The replicas that were started with one role, as reports and operators see them, whichever pool they are in."""

from __future__ import annotations

from typing import Protocol

from router.pool.pool import ReplicaPool
from router.pool.pool_counters import PoolCounters
from router.pool.replica import Replica
from router.pool.workers import WorkerPool


class RoleReplicas(Protocol):
    """What is told of the replicas of a role, and whom to ask or order; a pool of one role is its own."""

    @property
    def role(self) -> str:
        """The role's name."""

    @property
    def workers(self) -> WorkerPool:
        """Where to reach them."""

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """All that are known, those left out included."""

    @property
    def counters(self) -> PoolCounters:
        """What they counted, those included that are gone."""

    def age_s(self, replica: Replica) -> float:
        """Seconds since a replica's last report."""

    def forget_cache(self, replica_id: str) -> None:
        """Nothing is known any more of what a replica has cached."""


class RoleView:
    """Those of a pool with several roles that were started with one of them."""

    def __init__(self, pool: ReplicaPool, role: str, workers: WorkerPool) -> None:
        self.role = role
        self.workers = workers
        self.counters = pool.counters_of[role]
        self._pool = pool

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """All that are known, those left out included."""
        return tuple(replica for replica in self._pool.replicas if replica.role == self.role)

    def age_s(self, replica: Replica) -> float:
        """Seconds since a replica's last report."""
        return self._pool.age_s(replica)

    def forget_cache(self, replica_id: str) -> None:
        """Nothing is known any more of what a replica has cached."""
        self._pool.forget_cache(replica_id)
