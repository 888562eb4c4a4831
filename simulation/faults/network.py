"""The connections between routers and virtual workers: each can be slow, silent for a while, or cut."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from engine.contract.messages import CacheReset, GenerateRequest, StepMessage
from kv_transfer.fault_options import FaultOptions
from router.pool.workers import ReplicaStatus, WorkerError, WorkerPool, WorkerRefusedError, WorkerUnavailableError

T = TypeVar("T")

EARLY_S = 1e-6
"""Timers may be this much early, by the resolution of the loop's clock."""


class Direction:
    """One direction of a connection. What is sent arrives after a delay, and not while it is silent."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.delay_s = 0.0
        self._loop = loop
        self._is_silent = False
        self._last_s = 0.0
        self._numbers = itertools.count()
        self._on_the_way: list[tuple[float, int, Callable[[], object]]] = []

    def send(self, arrive: Callable[[], object], *, is_ordered: bool = True) -> None:
        """Call ``arrive`` at the other end; if ``is_ordered``, not before what was sent so earlier."""
        due_s = self._loop.time() + self.delay_s
        if is_ordered:
            due_s = self._last_s = max(self._last_s, due_s)
        heapq.heappush(self._on_the_way, (due_s, next(self._numbers), arrive))
        self._loop.call_at(due_s, self._deliver)

    def be_silent(self) -> None:
        """Deliver nothing until ``speak``."""
        self._is_silent = True

    def speak(self) -> None:
        """Deliver what waited, and what is sent from now on."""
        self._is_silent = False
        self._deliver()

    def lose_all(self) -> None:
        """Lose what is on the way."""
        self._on_the_way.clear()

    def _deliver(self) -> None:
        while not self._is_silent and self._on_the_way and self._on_the_way[0][0] <= self._loop.time() + EARLY_S:
            heapq.heappop(self._on_the_way)[2]()


class Connection:
    """Both directions between one router and one worker.

    Calls that were sent are carried out though their caller gives up: their bytes are on the way. Unless ``is_link``,
    a call may overtake earlier ones, as where each is sent by itself.
    """

    def __init__(self, replica_id: str, loop: asyncio.AbstractEventLoop, *, is_link: bool) -> None:
        self.is_link = is_link
        self.out, self.back = Direction(loop), Direction(loop)
        self._replica_id = replica_id
        self._loop = loop
        self._is_refused = self._is_dead = False
        self.is_disturbed = False
        """True from a fault until it is mended."""
        self._answers: set[asyncio.Future[Any]] = set()
        self._streams: set[_Stream] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_open(self) -> int:
        """Calls without an answer, and open streams at the worker."""
        return len(self._answers) + len(self._streams) + len(self._tasks)

    def slow_down(self, delay_s: float, *, is_only_back: bool = False) -> None:
        """Let everything take this much longer from now on; with ``is_only_back`` only what the worker sends."""
        self.is_disturbed = True
        self.back.delay_s = delay_s
        self.out.delay_s = 0.0 if is_only_back else delay_s

    def be_silent(self) -> None:
        """Let nothing arrive at either end until ``mend``; it is not lost."""
        self.is_disturbed = True
        self.out.be_silent()
        self.back.be_silent()

    def cut(self, *, is_refused: bool) -> None:
        """Break it: what is on the way is lost, calls fail, streams end. With ``is_refused`` so do new ones."""
        self.is_disturbed = True
        self._is_refused = is_refused
        for answer in tuple(self._answers):
            if not answer.done():
                answer.set_exception(self._broken())
        for stream in self._streams:
            stream.end(self._broken())
        self._lose_all()

    def mend(self) -> None:
        """Let everything arrive again, at once."""
        self._is_refused = False
        self.out.delay_s = self.back.delay_s = 0.0
        self.is_disturbed = False
        self.out.speak()
        self.back.speak()

    def die(self) -> None:
        """Break it for ever: the router's process has ended, and only the worker learns of it."""
        self._is_dead = True
        self._lose_all()

    def _lose_all(self) -> None:
        self.out.lose_all()
        self.back.lose_all()
        for stream in tuple(self._streams):
            self._spawn(self._hang_up(stream))

    async def call(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Have the worker carry out a call, and return its answer."""
        await self._check()
        answer: asyncio.Future[T] = self._loop.create_future()

        async def carry_out() -> None:
            try:
                result = await ask()
            except WorkerError as error:
                failure = error
                self._answer(lambda: None if answer.done() else answer.set_exception(failure))
            else:
                self._answer(lambda: None if answer.done() else answer.set_result(result))

        self._answers.add(answer)
        self.out.send(lambda: self._spawn(carry_out()), is_ordered=self.is_link)
        try:
            return await answer
        finally:
            self._answers.discard(answer)

    def _answer(self, take: Callable[[], object]) -> None:
        self.back.send(take, is_ordered=self.is_link)

    async def stream(self, open_stream: Callable[[], AsyncIterator[StepMessage]]) -> AsyncIterator[StepMessage]:
        """Open a stream at the worker, and yield its messages as they arrive."""
        await self._check()
        stream = _Stream()
        self._streams.add(stream)
        self.out.send(lambda: self._begin(stream, open_stream))
        try:
            while True:
                message = await stream.arrived.get()
                if isinstance(message, WorkerError):
                    raise message
                if message is None:
                    return
                yield message
        finally:
            if stream in self._streams:
                self.out.send(lambda: self._spawn(self._hang_up(stream)))

    async def _check(self) -> None:
        if self._is_dead:
            await self._loop.create_future()  # nothing goes on in a process that has ended
        if self._is_refused:
            raise self._broken()

    def _begin(self, stream: _Stream, open_stream: Callable[[], AsyncIterator[StepMessage]]) -> None:
        stream.reading = self._loop.create_task(self._read(stream, open_stream()))

    async def _read(self, stream: _Stream, messages: AsyncIterator[StepMessage]) -> None:
        """Send a worker's messages on their way as they are made, however slow the connection is."""
        try:
            async for message in messages:
                self.back.send(lambda message=message: stream.arrived.put_nowait(message))  # type: ignore[misc]
        except WorkerError as error:
            failure = error
            self.back.send(lambda: stream.end(failure))
        else:
            self.back.send(lambda: stream.end(None))
        finally:
            await messages.aclose()  # type: ignore[attr-defined]  # a generator

    async def _hang_up(self, stream: _Stream) -> None:
        """The worker learns that nobody reads any more."""
        self._streams.discard(stream)
        if stream.reading is not None:
            stream.reading.cancel()
            await asyncio.gather(stream.reading, return_exceptions=True)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _broken(self) -> WorkerUnavailableError:
        return WorkerUnavailableError(replica_id=self._replica_id, reason="the connection broke")


class _Stream:
    """A stream between both ends: what has arrived at the router, and the task that reads it at the worker."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[StepMessage | WorkerError | None] = asyncio.Queue()
        self.reading: asyncio.Task[None] | None = None

    def end(self, error: WorkerError | None) -> None:
        """Let the reader have what arrived before, and then the end."""
        self.arrived.put_nowait(error)


class Connections:
    """The connections of one router to all workers, by the worker's name."""

    def __init__(self, *, are_links: bool = True) -> None:
        self._are_links = are_links
        self._loop = asyncio.get_running_loop()
        self._connections: dict[str, Connection] = {}
        self._are_dead = False

    def to(self, replica_id: str) -> Connection:
        """The connection to a worker."""
        if replica_id not in self._connections:
            self._connections[replica_id] = Connection(replica_id, self._loop, is_link=self._are_links)
            if self._are_dead:
                self._connections[replica_id].die()
        return self._connections[replica_id]

    def die(self) -> None:
        """Break all of them for ever, and those to come: the router's process has ended."""
        self._are_dead = True
        for connection in self._connections.values():
            connection.die()

    def all(self) -> Sequence[Connection]:
        """Those that were used."""
        return tuple(self._connections.values())


class ConnectedPool:
    """Implements ``WorkerPool``: another pool's workers as one router reaches them over its connections."""

    def __init__(self, workers: WorkerPool, connections: Connections) -> None:
        self._workers = workers
        self._connections = connections

    def replica_ids(self) -> Sequence[str]:
        """See ``WorkerPool``."""
        return self._workers.replica_ids()

    def has_link(self, replica_id: str) -> bool:
        """See ``WorkerPool``."""
        return self._to(replica_id).is_link

    async def status(self, replica_id: str, *, timeout_s: float) -> ReplicaStatus:
        """See ``WorkerPool``."""
        return await self._to(replica_id).call(lambda: self._workers.status(replica_id, timeout_s=timeout_s))

    async def submit(self, replica_id: str, requests: Sequence[GenerateRequest]) -> Sequence[WorkerRefusedError | None]:
        """See ``WorkerPool``."""
        return await self._to(replica_id).call(lambda: self._workers.submit(replica_id, requests))

    async def abort(self, replica_id: str, request_ids: Sequence[str]) -> None:
        """See ``WorkerPool``."""
        await self._to(replica_id).call(lambda: self._workers.abort(replica_id, request_ids))

    async def move_out(self, replica_id: str, request_ids: Sequence[str], *, only_waiting: bool = False) -> None:
        """See ``WorkerPool``."""
        await self._to(replica_id).call(
            lambda: self._workers.move_out(replica_id, request_ids, only_waiting=only_waiting)
        )

    async def drain(self, replica_id: str) -> None:
        """See ``WorkerPool``."""
        await self._to(replica_id).call(lambda: self._workers.drain(replica_id))

    async def lean(self, replica_id: str, role: str) -> str:
        """See ``WorkerPool``."""
        return await self._to(replica_id).call(lambda: self._workers.lean(replica_id, role))

    async def set_faults(self, replica_id: str, options: FaultOptions) -> None:
        """See ``WorkerPool``."""
        await self._to(replica_id).call(lambda: self._workers.set_faults(replica_id, options))

    async def reset_prefix_cache(self, replica_id: str, *, preempt_running: bool) -> CacheReset | None:
        """See ``WorkerPool``."""
        return await self._to(replica_id).call(
            lambda: self._workers.reset_prefix_cache(replica_id, preempt_running=preempt_running)
        )

    async def resync_cache(self, replica_id: str, client_id: str) -> None:
        """See ``WorkerPool``."""
        await self._to(replica_id).call(lambda: self._workers.resync_cache(replica_id, client_id))

    def outputs(self, replica_id: str, client_id: str, *, mirrors_cache: bool = False) -> AsyncIterator[StepMessage]:
        """See ``WorkerPool``."""
        return self._to(replica_id).stream(
            lambda: self._workers.outputs(replica_id, client_id, mirrors_cache=mirrors_cache)
        )

    def _to(self, replica_id: str) -> Connection:
        return self._connections.to(replica_id)
