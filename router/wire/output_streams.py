"""One long-lived stream per replica; it fans out every step's tokens to their requests."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from engine.contract.messages import StepMessage, TokenDelta, Told
from router.pool.pool import STALLED, ReplicaPool
from router.pool.workers import StreamNotBegunError, WorkerError, WorkerPool, WorkerUnavailableError
from router.settings import RouterSettings

logger = logging.getLogger(f"baton.{__name__}")


class Sink(Protocol):
    """The receiver of one request's tokens."""

    @property
    def on_told(self) -> Callable[[Told], None]:
        """Called with what the worker reports about the request, before the tokens that it concerns."""

    def on_delta(self, delta: TokenDelta) -> None:
        """New tokens."""

    def on_lost(self, error: WorkerUnavailableError) -> None:
        """The stream broke; it will bring no more tokens."""


class OutputStream:
    """The stream of one replica. Every stream has a new ``client_id``, so that closing an old one does not end this
    router's new requests on the same replica.
    """

    def __init__(self, replica_id: str, client_id: str, *, heard_at_s: float) -> None:
        self.replica_id = replica_id
        self.client_id = client_id
        self.heard_at_s = heard_at_s
        self.connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sinks: dict[str, Sink] = {}
        self.num_unknown_deltas = 0
        self.asking: asyncio.Task[None] | None = None
        self.error: WorkerUnavailableError | None = None

    def attach(self, request_id: str, sink: Sink) -> None:
        """Deliver this request's deltas from now on. Call it before the request is submitted.

        Raises:
            WorkerUnavailableError: The stream is broken already.
        """
        if self.error is not None:
            raise self.error
        self.sinks[request_id] = sink

    def detach(self, request_id: str) -> None:
        """Stop delivering a request's deltas; late ones are counted and dropped."""
        self.sinks.pop(request_id, None)

    def dispatch(self, message: StepMessage) -> None:
        """Hand one step's deltas to their requests."""
        sinks = self.sinks
        for told in message.told:
            if (concerned := sinks.get(told.request_id)) is not None:
                concerned.on_told(told)
        for delta in message.deltas:
            sink = sinks.get(delta.request_id)
            if sink is None:
                self.num_unknown_deltas += 1
            else:
                sink.on_delta(delta)

    def fail(self, error: WorkerUnavailableError) -> None:
        """Tell all sinks that the stream is lost."""
        self.error = error
        if not self.connected.done():
            self.connected.set_result(None)
        sinks, self.sinks = self.sinks, {}
        for sink in sinks.values():
            sink.on_lost(error)


class OutputStreams:
    """All streams of this router. Opens them, updates the pool's view of the load, and notices broken ones."""

    def __init__(
        self,
        workers: WorkerPool,
        pool: ReplicaPool,
        *,
        settings: RouterSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers = workers
        self._clock = clock
        self._pool = pool
        self._settings = settings
        self._name = f"router-{uuid.uuid4().hex[:12]}"
        self._num_opened = 0
        self._streams: dict[str, OutputStream] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def open(self, replica_id: str) -> OutputStream:
        """The stream of a replica, opened if necessary."""
        stream = self._streams.get(replica_id)
        if stream is None:
            self._num_opened += 1
            stream = OutputStream(replica_id, f"{self._name}-{self._num_opened}", heard_at_s=self._clock())
            self._streams[replica_id] = stream
            # In a context of its own: the task serves many requests, not just the one that opens the stream.
            self._tasks[stream.client_id] = asyncio.create_task(self._read(stream), context=contextvars.Context())
        return stream

    async def connect(self, replica_id: str) -> OutputStream:
        """Wait for a replica's stream to bring its first message; from then on no token can be missed.

        Raises:
            StreamNotBegunError: The stream could not be opened, or brought nothing in time.
            WorkerUnavailableError: The replica was gone before.
        """
        stream = self.open(replica_id)
        if not stream.connected.done():
            timeout_s = self._settings.connect_timeout_s
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.shield(stream.connected)
            except TimeoutError:
                reason = f"its output stream did not begin within {timeout_s:g} s"
                raise StreamNotBegunError(replica_id=replica_id, reason=reason) from None
        if stream.error is not None:
            if stream.error.was_called:
                raise StreamNotBegunError(replica_id=replica_id, reason=stream.error.reason)
            raise stream.error
        return stream

    def give_up(self, error: WorkerUnavailableError) -> None:
        """Tell all requests on a replica that it is lost, and close its stream."""
        stream = self._streams.pop(error.replica_id, None)
        if stream is not None:
            self._pool.note_stream_end(error.replica_id)
            stream.fail(error)
            self._tasks[stream.client_id].cancel()

    def give_up_silent(self) -> None:
        """Give up streams that were silent for too long: a live worker reports twice a second."""
        silence_s = self._settings.stream_silence_timeout_s
        limit_s = self._clock() - silence_s
        for stream in tuple(self._streams.values()):
            if stream.heard_at_s < limit_s:
                reason = f"its output stream was silent for {silence_s:g} s"
                self._pool.note_failure(stream.replica_id, reason)
                self.give_up(WorkerUnavailableError(replica_id=stream.replica_id, reason=reason))

    async def close(self) -> None:
        """Close all streams; the replicas abort what is left of ours."""
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, stream: OutputStream) -> None:
        replica_id = stream.replica_id
        error = WorkerUnavailableError(replica_id=replica_id, reason="its output stream ended")
        self._pool.forget_cache(replica_id)
        messages = self._workers.outputs(replica_id, stream.client_id, mirrors_cache=self._pool.mirror is not None)
        try:
            async with contextlib.AsyncExitStack() as stack:
                if hasattr(messages, "aclose"):
                    stack.push_async_callback(messages.aclose)
                await self._read_messages(stream, messages)
        except asyncio.CancelledError:
            stream.fail(WorkerUnavailableError(replica_id=replica_id, reason="the router is closing"))
            raise
        except WorkerUnavailableError as caught:
            error = caught
        except WorkerError as caught:
            error = WorkerUnavailableError(replica_id=replica_id, reason=str(caught))
        except Exception as caught:
            logger.exception("output stream failed: replica_id=%s", replica_id)
            error = WorkerUnavailableError(replica_id=replica_id, reason=f"{type(caught).__name__}: {caught}")
        finally:
            if stream.asking is not None:
                stream.asking.cancel()
            if self._streams.get(replica_id) is stream:
                del self._streams[replica_id]
                self._pool.note_stream_end(replica_id)
            self._tasks.pop(stream.client_id, None)
        if error.was_called:
            self._pool.note_failure(replica_id, error.reason)
        else:
            self._pool.note_gone(replica_id)
        stream.fail(error)

    async def _read_messages(self, stream: OutputStream, messages: AsyncIterator[StepMessage]) -> None:
        async for message in messages:
            stream.heard_at_s = self._clock()
            if not stream.connected.done():
                stream.connected.set_result(None)
            self._pool.note_load(stream.replica_id, message.load)
            stream.dispatch(message)
            if message.cache and not self._pool.note_cache(stream.replica_id, message.cache):
                self._ask_for_cache(stream)
            if message.load.is_stalled:
                raise WorkerUnavailableError(replica_id=stream.replica_id, reason=STALLED)

    def _ask_for_cache(self, stream: OutputStream) -> None:
        """Ask a replica for a snapshot of its whole prefix cache, which comes in the stream. The call runs in a task,
        so that a slow one neither delays tokens nor makes the stream look silent. There is one such call at a time.
        """
        if stream.asking is None or stream.asking.done():
            stream.asking = asyncio.create_task(self._ask_once(stream), context=contextvars.Context())

    async def _ask_once(self, stream: OutputStream) -> None:
        try:
            await self._workers.resync_cache(stream.replica_id, stream.client_id)
        except WorkerError as error:  # a later message asks again; if the replica is gone, its stream shows that
            logger.info("a replica does not tell its cache: %s", error)
