"""Calls methods of one chosen replica of a Serve deployment, with a deadline and with our own errors.

Any exception of Serve, Ray, gRPC or the replica's code becomes a ``WorkerUnavailableError``. Refusals are returned as
values (see ``cluster/serve/refusal.py``), so any exception means that this replica cannot be relied on.
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
"""All arguments and results are importable dataclasses, so cloudpickle, the slower default, is not needed."""


MAX_KEPT_METHODS = 4096
"""How many handles are cached: a few for each replica that ever existed. Beyond that they are made again."""


class Caller(Protocol):
    """Calls to the replicas of one deployment; ``ReplicaCaller`` over Serve, a fake in tests."""

    def connect(self) -> None:
        """Begin to follow the list of replicas."""

    def replica_ids(self) -> Sequence[str]:
        """The replicas that can be called now."""

    async def call(self, replica_id: str, method: str, *args: object, timeout_s: float) -> Any:
        """Call a method; raises WorkerUnavailableError."""

    def stream(self, replica_id: str, method: str, *args: object) -> AsyncIterator[Any]:
        """Iterate over a generator method; the iterator raises WorkerUnavailableError."""


FIRST_LISTS_S = 3.0
"""How long to wait for Serve's lists of replicas. They arrive a moment later; in a starting cluster they stay empty."""

LIST_POLL_S = 0.02


async def wait_for_lists(callers: Collection[Caller], *, timeout_s: float = FIRST_LISTS_S) -> None:
    """Return when replicas of all these deployments are known, or when ``timeout_s`` is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not all(caller.replica_ids() for caller in callers):  # noqa: ASYNC110 (lists of Serve, without events)
                await asyncio.sleep(LIST_POLL_S)


class ReplicaCaller:
    """Calls to one deployment, from one event loop, always through an ``AddressedRouter``."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._methods: dict[tuple[str, str], DeploymentHandle[Any]] = {}

    def connect(self) -> None:
        """Begin to follow the list of replicas. Call it on the event loop that will make the calls.

        The ``AddressedRouter`` is set here and not in the deployment's settings. Behind HAProxy Serve refuses an
        ingress deployment whose settings name a router class, and routers are called, too: by each other.
        """
        handle: Any = self._handle
        if not handle.is_initialized:
            handle._create_router = functools.partial(create_router, request_router_class=AddressedRouter)
            handle._init()
            # Made now, before Serve's first message about the deployment names another class.
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
        """Yield what the generator ``method`` of one replica yields. Closing the iterator closes the generator.

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
        """A handle for one method of one replica. Handles are cached, since making one takes longer than a call."""
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

        Serve shows it only to the router class itself, so this reads private attributes. Ray is pinned to one version,
        and tests/e2e would show a change.
        """
        router: Any = self._handle._router
        addressed = router._asyncio_router.request_router if router is not None else None
        return addressed.curr_replicas if addressed is not None else {}


async def in_fresh_context(coroutine: Coroutine[Any, Any, T], context: contextvars.Context) -> T:
    """Await ``coroutine`` outside of the context of the HTTP request that is handled here, if there is one.

    Serve ties every call made during an HTTP request to that request: it cancels the call when the client disconnects,
    and returns its result undecoded. But our calls serve many requests. Streams and submissions already run outside of
    requests, so they need no task of their own, which would cost more than a message.

    Raises:
        ConnectionAbortedError: The replica cancelled the call, because it shuts down. Serve reports that with
            ``CancelledError``, which would look like our own task's cancellation.
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
    """The error that a failed call means to the router."""
    was_called = not isinstance(error, UnknownReplicaError)
    return WorkerUnavailableError(replica_id=replica_id, reason=one_line(error), was_called=was_called)


def one_line(error: BaseException) -> str:
    """The error's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
