"""Calls methods of one chosen replica of a Serve deployment, with a deadline and with errors that we own.

Whatever Serve, Ray, gRPC or the replica's own code raise becomes a ``WorkerUnavailableError``: refusals come as values
(see ``cluster/refusal.py``), so that anything else means that this replica cannot be relied on.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from ray.serve.handle import DeploymentHandle

from router.workers import WorkerUnavailableError

T = TypeVar("T")

SERIALIZATION = "pickle"
"""Everything that passes is an importable dataclass; cloudpickle, the default, is slower and gives nothing here."""


class Caller(Protocol):
    """Calls to the replicas of one deployment; ``ReplicaCaller`` over Serve, a fake in tests."""

    def connect(self) -> None:
        """Begin to follow the set of replicas."""

    def replica_ids(self) -> Sequence[str]:
        """The replicas that can be called now."""

    async def call(self, replica_id: str, method: str, *args: object, timeout_s: float) -> Any:
        """Call a method; raises WorkerUnavailableError."""

    def stream(self, replica_id: str, method: str, *args: object) -> AsyncIterator[Any]:
        """Iterate over a generator method; the iterator raises WorkerUnavailableError."""


class ReplicaCaller:
    """One deployment, seen from one event loop. The deployment must use ``AddressedRouter``."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    def connect(self) -> None:
        """Begin to follow the set of replicas. Call it on the event loop that will make the calls."""
        handle: Any = self._handle
        if not handle.is_initialized:
            handle._init()

    def replica_ids(self) -> Sequence[str]:
        """The running replicas as of Serve's last broadcast, without those found dead since. No network call."""
        return [replica_id.unique_id for replica_id in self._replicas()]

    async def call(self, replica_id: str, method: str, *args: object, timeout_s: float) -> Any:
        """Call ``method`` on one replica.

        Raises:
            WorkerUnavailableError: The replica is gone, or did not answer in time; the call is then cancelled there.
        """

        async def run() -> Any:
            return await self._method(method, replica_id, is_stream=False).remote(*args)

        try:
            async with asyncio.timeout(timeout_s):
                return await in_fresh_context(run(), contextvars.Context())
        except TimeoutError as error:
            reason = f"no answer to {method} within {timeout_s:g} s"
            raise WorkerUnavailableError(replica_id=replica_id, reason=reason) from error
        except Exception as error:
            raise WorkerUnavailableError(replica_id=replica_id, reason=one_line(error)) from error

    async def stream(self, replica_id: str, method: str, *args: object) -> AsyncIterator[Any]:
        """Yield what the generator ``method`` of one replica yields; closing the iterator closes it there.

        Raises:
            WorkerUnavailableError: The replica is gone.
        """
        context = contextvars.Context()

        async def start() -> Any:
            return self._method(method, replica_id, is_stream=True).remote(*args)

        try:
            generator = await in_fresh_context(start(), context)
            try:
                while True:
                    yield await in_fresh_context(generator.__anext__(), context)
            except StopAsyncIteration:
                return
            finally:
                generator.cancel()
        except Exception as error:
            raise WorkerUnavailableError(replica_id=replica_id, reason=one_line(error)) from error

    def _method(self, method: str, replica_id: str, *, is_stream: bool) -> DeploymentHandle[Any]:
        return self._handle.options(
            method_name=method,
            stream=is_stream,
            session_id=replica_id,
            request_serialization=SERIALIZATION,
            response_serialization=SERIALIZATION,
        )

    def _replicas(self) -> dict[Any, Any]:
        """The replica set of the handle's AddressedRouter; empty until Serve's first broadcast arrived.

        Serve shows it only to the class of the router itself. The attributes are private, and Ray is pinned to one
        version; tests/e2e would show a change.
        """
        router: Any = self._handle._router
        addressed = router._asyncio_router.request_router if router is not None else None
        return addressed.curr_replicas if addressed is not None else {}


async def in_fresh_context(coroutine: Coroutine[Any, Any, T], context: contextvars.Context) -> T:
    """Await ``coroutine`` outside of the caller's context variables.

    Serve ties every call made while an HTTP request is handled to that request: it cancels the call when the client
    leaves, and hands its result over undecoded. Our calls serve many requests.

    Raises:
        ConnectionAbortedError: The replica cancelled the call, because it shuts down. Serve sends it as the exception
            by which a task is told of its own cancellation.
    """
    task = asyncio.get_running_loop().create_task(coroutine, context=context)
    try:
        return await task
    except asyncio.CancelledError as error:
        current = asyncio.current_task()
        if task.cancelled() and (current is None or not current.cancelling()):
            raise ConnectionAbortedError("the replica cancelled the call") from error
        raise


def one_line(error: BaseException) -> str:
    """The error's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
