"""The workers of several roles as one pool: each call goes to the role that the replica belongs to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

from engine.contract.messages import CacheReset, GenerateRequest, StepMessage
from kv_transfer.fault_options import FaultOptions
from router.pool.workers import ReplicaStatus, WorkerPool, WorkerRefusedError, WorkerUnavailableError


class UnitedWorkers:
    """A ``router.pool.workers.WorkerPool`` over the workers of several roles; replica ids are unique among them."""

    def __init__(self, members: Mapping[str, WorkerPool]) -> None:
        """``members`` are the workers of each role, by the role's name."""
        self.members = dict(members)
        self._roles: dict[str, str] = {}

    def replica_ids(self) -> Sequence[str]:
        """The replicas of all roles that can be addressed now."""
        self._roles = {replica_id: role for role, member in self.members.items() for replica_id in member.replica_ids()}
        return tuple(self._roles)

    def role_of(self, replica_id: str) -> str:
        """The role that a replica was started with.

        Raises:
            WorkerUnavailableError: It is not there any more.
        """
        if replica_id not in self._roles:
            self.replica_ids()
        if replica_id not in self._roles:
            raise WorkerUnavailableError(
                replica_id=replica_id, reason="no running replica has this id", was_called=False
            )
        return self._roles[replica_id]

    def has_link(self, replica_id: str) -> bool:
        """True if calls go as frames over an open connection."""
        return any(member.has_link(replica_id) for member in self.members.values())

    async def status(self, replica_id: str, *, timeout_s: float) -> ReplicaStatus:
        """Ask one replica; raises WorkerUnavailableError."""
        return await self._of(replica_id).status(replica_id, timeout_s=timeout_s)

    async def abort(self, replica_id: str, request_ids: Sequence[str]) -> None:
        """End requests in whatever state they are; raises WorkerUnavailableError."""
        await self._of(replica_id).abort(replica_id, request_ids)

    async def move_out(self, replica_id: str, request_ids: Sequence[str], *, only_waiting: bool = False) -> None:
        """Have requests leave a replica for another one; raises WorkerUnavailableError."""
        await self._of(replica_id).move_out(replica_id, request_ids, only_waiting=only_waiting)

    async def drain(self, replica_id: str) -> None:
        """Have a replica release its requests, and exit; raises WorkerUnavailableError."""
        await self._of(replica_id).drain(replica_id)

    async def lean(self, replica_id: str, role: str) -> str:
        """Have a replica prefer the work of a role; raises WorkerUnavailableError."""
        return await self._of(replica_id).lean(replica_id, role)

    async def set_faults(self, replica_id: str, options: FaultOptions) -> None:
        """Inject these faults into a replica's connector; raises WorkerRefusedError and WorkerUnavailableError."""
        await self._of(replica_id).set_faults(replica_id, options)

    async def reset_prefix_cache(self, replica_id: str, *, preempt_running: bool) -> CacheReset | None:
        """Have a replica drop its prefix cache; raises WorkerUnavailableError."""
        return await self._of(replica_id).reset_prefix_cache(replica_id, preempt_running=preempt_running)

    async def submit(self, replica_id: str, requests: Sequence[GenerateRequest]) -> Sequence[WorkerRefusedError | None]:
        """Add requests to an engine; raises WorkerUnavailableError."""
        return await self._of(replica_id).submit(replica_id, requests)

    async def outputs(
        self, replica_id: str, client_id: str, *, mirrors_cache: bool = False
    ) -> AsyncIterator[StepMessage]:
        """Open the stream of all messages for ``client_id``; raises WorkerUnavailableError."""
        messages = self._of(replica_id).outputs(replica_id, client_id, mirrors_cache=mirrors_cache)
        try:
            async for message in messages:
                yield message
        finally:
            if hasattr(messages, "aclose"):
                await messages.aclose()

    async def resync_cache(self, replica_id: str, client_id: str) -> None:
        """Ask for the whole prefix cache again; raises WorkerUnavailableError."""
        await self._of(replica_id).resync_cache(replica_id, client_id)

    def _of(self, replica_id: str) -> WorkerPool:
        return self.members[self.role_of(replica_id)]
