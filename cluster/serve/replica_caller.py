"""Calls methods of one chosen replica of a Serve deployment, with a deadline and with errors that we own.

Whatever Serve, Ray, gRPC or the replica's own code raise becomes a ``WorkerUnavailableError``: refusals come as values
(see ``cluster/serve/refusal.py``), so that anything else means that this replica cannot be relied on.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from ray.serve._private.default_impl import create_router
from ray.serve.context import _get_serve_request_context
from ray.serve.handle import DeploymentHandle

from cluster.serve.addressed_router import AddressedRouter, UnknownReplicaError
from router.pool.workers import WorkerUnavailableError

T = TypeVar("T")

SERIALIZATION = "pickle"
"""Everything that passes is an importable dataclass; cloudpickle, the default, is slower and gives nothing here."""


MAX_KEPT_METHODS = 4096
"""A few for each replica that there ever was; when there are more, they are made anew."""


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


FIRST_LISTS_S = 3.0
"""Serve sends its lists a moment after they were asked for; in a cluster that starts they stay empty for long."""

LIST_POLL_S = 0.02


async def wait_for_lists(callers: Collection[Caller], *, timeout_s: float = FIRST_LISTS_S) -> None:
    """Return when each of these deployments is known to have replicas, or ``timeout_s`` is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not all(caller.replica_ids() for caller in callers):  # noqa: ASYNC110 (lists of Serve, without events)
                await asyncio.sleep(LIST_POLL_S)


class ReplicaCaller:
    """One deployment, seen from one event loop, through an ``AddressedRouter`` whatever the deployment's own is."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._methods: dict[tuple[str, str], DeploymentHandle[Any]] = {}

    def connect(self) -> None:
        """Begin to follow the set of replicas. Call it on the event loop that will make the calls.

        The handle gets its router here and not from the deployment's settings: behind HAProxy Serve refuses an ingress
        whose settings name one, and routers call each other.
        """
        handle: Any = self._handle
        if not handle.is_initialized:
            handle._create_router = functools.partial(create_router, request_router_class=AddressedRouter)
            handle._init()
            # Made now, before Serve first tells of the deployment name another class.
            assert isinstance(handle._router._asyncio_router.request_router, AddressedRouter)

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
            raise unavailable(replica_id, error) from error

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
            raise unavailable(replica_id, error) from error

    def _method(self, method: str, replica_id: str, *, is_stream: bool) -> DeploymentHandle[Any]:
        """A handle for one method of one replica. Making one takes longer than a call, so they are kept."""
        key = (method, replica_id)
        kept = self._methods.get(key)
        if kept is None:
            if len(self._methods) >= MAX_KEPT_METHODS:
                self._methods.clear()
            kept = self._methods[key] = self._handle.options(
                method_name=method,
                stream=is_stream,
                session_id=replica_id,
                request_serialization=SERIALIZATION,
                response_serialization=SERIALIZATION,
            )
        return kept

    def _replicas(self) -> dict[Any, Any]:
        """The replica set of the handle's AddressedRouter; empty until Serve's first broadcast arrived.

        Serve shows it only to the class of the router itself. The attributes are private, and Ray is pinned to one
        version; tests/e2e would show a change.
        """
        router: Any = self._handle._router
        addressed = router._asyncio_router.request_router if router is not None else None
        return addressed.curr_replicas if addressed is not None else {}


async def in_fresh_context(coroutine: Coroutine[Any, Any, T], context: contextvars.Context) -> T:
    """Await ``coroutine`` outside of the request that is handled here, if one is.

    Serve ties every call made while an HTTP request is handled to that request: it cancels the call when the client
    leaves, and hands its result over undecoded. Our calls serve many requests. Streams and submissions run outside of
    requests already, and need no task for that: it would cost more than a message does.

    Raises:
        ConnectionAbortedError: The replica cancelled the call, because it shuts down. Serve sends it as the exception
            by which a task is told of its own cancellation.
    """
    task: asyncio.Task[T] | None = None
    if _get_serve_request_context()._internal_request_id:
        task = asyncio.get_running_loop().create_task(coroutine, context=context)
    try:
        return await (coroutine if task is None else task)
    except asyncio.CancelledError as error:
        current = asyncio.current_task()
        if (task is None or task.cancelled()) and (current is None or not current.cancelling()):
            raise ConnectionAbortedError("the replica cancelled the call") from error
        raise


def unavailable(replica_id: str, error: Exception) -> WorkerUnavailableError:
    """What a failed call means to the router."""
    was_called = not isinstance(error, UnknownReplicaError)
    return WorkerUnavailableError(replica_id=replica_id, reason=one_line(error), was_called=was_called)


def one_line(error: BaseException) -> str:
    """The error's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
