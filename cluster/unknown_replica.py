"""The error of a call that is sent to nobody."""

from __future__ import annotations

from ray.serve.exceptions import ReplicaUnavailableError


class UnknownReplicaError(ReplicaUnavailableError):
    """The addressed replica is not running (any more), as far as Serve knows: the call was not sent.

    Not in the module of ``AddressedRouter``, which Serve copies by value, its classes included.
    """
