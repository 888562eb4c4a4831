"""The replicas that were started with one role, for reports and operators, whichever pool they are in."""

from __future__ import annotations

from typing import Protocol

from router.pool.pool import ReplicaPool
from router.pool.pool_counters import PoolCounters
from router.pool.replica import Replica
from router.pool.workers import WorkerPool


class RoleReplicas(Protocol):
    """The replicas of a role, for reports, questions and orders; a pool of one role implements it itself."""

    @property
    def role(self) -> str:
        """The role's name."""

    @property
    def workers(self) -> WorkerPool:
        """How to reach them."""

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """All that are known, those left out included."""

    @property
    def counters(self) -> PoolCounters:
        """Their counters, including those of departed ones."""

    def age_s(self, replica: Replica) -> float:
        """Seconds since a replica's last report."""

    def forget_cache(self, replica_id: str) -> None:
        """Nothing is known any more of what a replica has cached."""


class RoleView:
    """The replicas of one role in a pool of several roles."""

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
