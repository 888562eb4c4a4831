"""Lets Serve spread HTTP requests over the routers as it does, and send a router's own call to the one it names.

Serve pickles this class, with everything in this module, by value: keep it free of module state.
"""

from __future__ import annotations

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica


class IngressRouter(PowerOfTwoChoicesRequestRouter):
    """Serve's own choice, but for calls whose ``session_id`` is the id of a replica (see ``AddressedRouter``)."""

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Return the addressed replica, or Serve's choice where none is addressed."""
        address = pending_request.metadata.session_id
        replica = self._replicas.get(ReplicaID(address, self._deployment_id)) if address and not is_retry else None
        return replica or await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
