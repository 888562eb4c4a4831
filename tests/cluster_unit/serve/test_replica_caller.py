"""What the router learns from a failed call, above all whether the call may have begun."""

from __future__ import annotations

from typing import Any

import pytest
from ray.serve.exceptions import ReplicaUnavailableError

from cluster.serve.addressed_router import UnknownReplicaError
from cluster.serve.replica_caller import ReplicaCaller
from router.pool.workers import WorkerUnavailableError


class FailingHandle:
    """A Serve handle every call of which fails."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def options(self, **_: object) -> FailingHandle:
        return self

    def remote(self, *_: object) -> Any:
        raise self._error


@pytest.mark.parametrize(
    ("error", "was_called"),
    [(UnknownReplicaError("gone"), False), (ReplicaUnavailableError("did not take it"), True), (OSError("cut"), True)],
    ids=lambda value: type(value).__name__,
)
async def test_only_a_call_to_an_unknown_replica_began_nothing(error: Exception, *, was_called: bool) -> None:
    caller = ReplicaCaller(FailingHandle(error))  # type: ignore[arg-type]

    with pytest.raises(WorkerUnavailableError) as of_call:
        await caller.call("a", "status", timeout_s=5.0)
    with pytest.raises(WorkerUnavailableError) as of_stream:
        async for _ in caller.stream("a", "outputs"):
            pass

    assert of_call.value.was_called is of_stream.value.was_called is was_called
    assert "a" in str(of_call.value)
