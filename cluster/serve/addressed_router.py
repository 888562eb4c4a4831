"""Lets Serve send a call to the one replica that the caller named."""

from __future__ import annotations

from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica


class UnknownReplicaError(ReplicaUnavailableError):
    """As far as Serve knows, the addressed replica is not running (any more): the call was not sent.

    This class must be importable on its own, since Serve copies ``AddressedRouter`` by value.
    """


class AddressedRouter(RequestRouter):
    """Takes the replica that ``session_id`` names, or fails at once.

    Serve's router would queue a call until some replica has room, and retry it on another replica after a failure.
    Neither may happen here: the caller limits its waits and chooses another replica itself. So this class overrides
    the method below the public ``choose_replicas``, because the public one runs inside that queue.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return only the addressed replica. Only Serve itself calls this."""
        address = pending_request.metadata.session_id if pending_request is not None else ""
        return [[replica for replica in candidate_replicas if replica.replica_id.unique_id == address]]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Return the addressed replica.

        Raises:
            UnknownReplicaError: It is not in the set of running replicas.
            ReplicaUnavailableError: It was just found to be unavailable.
        """
        address = pending_request.metadata.session_id
        replica = self._replicas.get(ReplicaID(address, self._deployment_id))
        if replica is None:
            raise UnknownReplicaError(f"{self._deployment_id.name} has no running replica {address!r}")
        if is_retry:
            raise ReplicaUnavailableError(f"{self._deployment_id.name} replica {address!r} did not take the call")
        return replica
