"""An engine behind asyncio: a thread of its own steps it; requests and tokens cross in batches."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar, cast

from engine.contract.errors import EngineDeadError, EngineStalledError, RequestRefusedError
from engine.contract.messages import CacheChanges, CacheReset, GenerateRequest, LoadReport, StepMessage, TokenDelta
from engine.frontend.client_stream import MESSAGE_GAP_S, ClientStream, dead_delta, merge_deltas
from engine.frontend.engine_core import EngineCore
from engine.frontend.feeds import CacheFeed, LoadFeed
from engine.frontend.progress import Progress
from engine.scheduler.step_result import NOTHING_NEW, StepResult

logger = logging.getLogger(f"baton.{__name__}")

LOCAL_CLIENT = ""
"""Requests of this client are awaited one by one in this process, not sent over a stream."""

STEP_TIMEOUT_S = 30.0
"""How long a step may take unless somebody says otherwise; `health.step_timeout_s` in a cluster."""

T = TypeVar("T")
Command = Callable[[], None]


class AsyncEngine:
    """Adds, aborts and streams.

    The engine's thread owns the core. Everything else happens on the event loop that called :meth:`start`; the two
    meet in a list of commands (towards the thread) and one callback a step (towards the loop). An engine whose thread
    has been in one turn for ``step_timeout_s``, or whose requests have waited so long for nothing that is under way,
    counts as hanging: its reports and its health say so. ``clock`` measures that; it may stand still while the process
    gets no processor.
    """

    def __init__(
        self,
        core: EngineCore,
        *,
        name: str = "engine",
        step_timeout_s: float = STEP_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._name = name
        self._step_timeout_s = step_timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._commands: list[Command] = []
        self._is_stopping = False
        self._has_ended = False
        self._failure: BaseException | None = None
        self._load_feed = LoadFeed(core)
        self._load = self._load_feed.now()
        self._streams: dict[str, ClientStream] = {}
        self._local: dict[str, ClientStream] = {}
        self._requests_of: dict[str, set[str]] = {}
        self._progress = Progress(clock)
        self._is_draining = False
        self._moves_out = False
        self.num_peers = 0
        self._delivered = asyncio.Event()

    def start(self) -> None:
        """Start stepping. Must be called on the event loop that will use the engine."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name=f"baton-{self._name}", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Stop the thread, end what is unfinished with an error, release the connector. Idempotent."""
        self._is_stopping = True
        self._core.wake.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self._end_all()
        await asyncio.to_thread(self._core.close)

    def check_health(self) -> None:
        """Do nothing if the engine can serve.

        Raises:
            EngineDeadError: Its thread ended, or was never started.
            EngineStalledError: It made no step for too long while it had work.
        """
        if self._failure is not None:
            raise EngineDeadError(f"the engine's loop ended: {self._failure!r}")
        if self._thread is None or not self._thread.is_alive():
            raise EngineDeadError("the engine is not running")
        if self.is_stalled:
            raise EngineStalledError(busy_s=self._progress.busy_s, step_timeout_s=self._step_timeout_s)

    @property
    def load(self) -> LoadReport:
        """The engine's load after its last step, and whether that is too long ago."""
        load = replace(self._load, num_peers=self.num_peers, is_draining=self._is_draining)
        return replace(load, is_stalled=self.is_stalled, has_hung_read=self._core.has_hung_read)

    @property
    def is_stalled(self) -> bool:
        """True when no step ended for ``step_timeout_s`` though there is work."""
        return self._progress.busy_s > self._step_timeout_s

    # ---- requests

    async def submit(self, requests: Sequence[GenerateRequest]) -> list[RequestRefusedError | None]:
        """Add requests, whose tokens will come on :meth:`outputs` of their client. One answer each, in order.

        Raises:
            EngineDeadError: Nothing was added.
        """
        new = [
            request
            for request in requests
            if request.kv_stream is None and request.request_id not in self._requests_of.get(request.client_id, ())
        ]
        for request in new:
            self._requests_of.setdefault(request.client_id, set()).add(request.request_id)
        answers = await self._call(lambda: [self._try_add(request) for request in requests])
        refused = {request.request_id for request, answer in zip(requests, answers, strict=True) if answer is not None}
        for request in new:
            if request.request_id in refused:
                self._forget(request.client_id, request.request_id)
        return answers

    async def run_to_end(self, request: GenerateRequest) -> TokenDelta:
        """Add one request, wait for its end, and return all its tokens as one delta. Cancelling aborts it.

        Raises:
            RequestRefusedError: The engine can never serve it.
        """
        return merge_deltas([delta async for delta in self.generate(request)])

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        """Add one request of the local client and yield its deltas. Closing the iterator aborts the request.

        Raises:
            RequestRefusedError: The engine can never serve it.
        """
        if request.request_id in self._local:
            raise RequestRefusedError(f"request id {request.request_id!r} is already in use", code="duplicate_request")
        stream = self._local[request.request_id] = ClientStream()
        is_unfinished = True
        try:
            refusal = (await self._call(lambda: [self._try_add(request)]))[0]
            if refusal is not None:
                is_unfinished = False
                raise refusal
            while is_unfinished:
                for delta in await stream.take():
                    is_unfinished = delta.finish_reason is None
                    yield delta
        finally:
            del self._local[request.request_id]
            if is_unfinished:
                self.abort_nowait([request.request_id])

    async def outputs(
        self, client_id: str, *, report_period_s: float, mirrors_cache: bool = False
    ) -> AsyncIterator[StepMessage]:
        """Yield one message a step with all that is new for a client, and one every ``report_period_s`` when idle.

        With ``mirrors_cache`` the messages also tell of the prefix cache, from a snapshot on. A second stream of the
        same client takes over from the first. Closing the iterator aborts the client's requests.
        """
        self.check_health()
        if (previous := self._streams.get(client_id)) is not None:
            previous.close()
        stream = self._streams[client_id] = ClientStream(
            cache=CacheFeed() if mirrors_cache else None, min_gap_s=MESSAGE_GAP_S
        )
        try:
            cache = await self._take_cache_changes(stream.cache, patience_s=report_period_s)
            yield StepMessage(deltas=(), load=self.load, cache=cache)
            while not stream.is_closed:
                deltas = await stream.take(timeout_s=report_period_s)
                cache = await self._take_cache_changes(stream.cache, patience_s=report_period_s)
                yield StepMessage(deltas=tuple(deltas), load=self.load, cache=cache)
        finally:
            if stream.cache is not None and stream.cache.snapshot is not None:
                stream.cache.snapshot.cancel()
            if self._streams.get(client_id) is stream:
                del self._streams[client_id]
                self.abort_nowait(tuple(self._requests_of.pop(client_id, ())))
                if not self._has_ended:
                    self._post(lambda: self._core.forget_client(client_id))

    @property
    def is_draining(self) -> bool:
        """True when it takes no more requests."""
        return self._is_draining

    def stop_admissions(self) -> None:
        """Take no more requests."""
        self._is_draining = True

    async def drain(self, *, moves_out: bool) -> None:
        """Take no more requests, and return when nothing is left here: no request, and no lease of a finished one.

        With ``moves_out`` running requests end at once with a hand-over of what was computed for them, and waiting
        ones unserved, for another engine to go on; otherwise they run to their end. The caller bounds the wait.
        """
        self.stop_admissions()
        self._moves_out = moves_out
        for _ in range(2):  # the first call ends the admissions, the second comes after the report that knows of them
            await self._call(lambda: None)
        while not self._load.is_empty:
            self._delivered.clear()
            await self._delivered.wait()

    def end_streams(self) -> None:
        """Close all streams, whose clients learn that nothing more comes."""
        for stream in self._streams.values():
            stream.close()

    def resync_cache(self, client_id: str) -> None:
        """Let the next message of a client's stream tell of the whole prefix cache."""
        stream = self._streams.get(client_id)
        if stream is not None and stream.cache is not None:
            stream.cache.needs_snapshot = True

    async def reset_prefix_cache(self, *, preempt_running: bool) -> CacheReset | None:
        """Drop the prefix cache; None where requests hold blocks and may not be preempted for it."""
        return await self._call(lambda: self._core.reset_prefix_cache(preempt_running=preempt_running))

    def abort_nowait(self, request_ids: Sequence[str]) -> None:
        """End requests at the next step boundary; unknown ids are ignored, and so is everything after the end."""
        if request_ids and not self._has_ended:
            self._post(lambda: self._core.abort(request_ids))

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests and return when the engine has taken note; unknown ids are ignored."""
        await self._call(lambda: self._core.abort(request_ids))

    # ---- the loop's side

    async def _take_cache_changes(self, cache: CacheFeed | None, *, patience_s: float) -> tuple[CacheChanges, ...]:
        """What there is to tell of the prefix cache.

        A snapshot waits for the step that runs, which may take longer than anybody waits for a report: one that is not
        there after ``patience_s`` comes with a later message.
        """
        if cache is None:
            return ()
        if cache.snapshot is None:
            if not cache.needs_snapshot:
                return cache.take()
            # What happens from here on is kept: some of it may be in the snapshot already, which does no harm.
            cache.take()
            cache.needs_snapshot = False
            cache.snapshot = asyncio.create_task(self._call(self._core.cache_snapshot))
        await asyncio.wait((cache.snapshot,), timeout=patience_s)
        if not cache.snapshot.done():
            return ()
        asked, cache.snapshot = cache.snapshot, None
        try:
            return (asked.result(), *cache.take())
        except EngineDeadError:
            return ()

    def _deliver(self, result: StepResult, load: LoadReport, changes: CacheChanges | None = None) -> None:
        """Pass on what a step brought. Messages are made here, while the next step computes."""
        self._load = load
        self._delivered.set()
        if changes is not None:
            self._pass_on(changes)
        for client_id, of_client in result.deltas_by_client().items():
            if client_id == LOCAL_CLIENT:
                for delta in of_client:
                    if (local := self._local.get(delta.request_id)) is not None:
                        local.put((delta,))
                continue
            for delta in of_client:
                if delta.finish_reason is not None:
                    self._forget(client_id, delta.request_id)
            if (stream := self._streams.get(client_id)) is not None:
                stream.put(of_client)

    def _pass_on(self, changes: CacheChanges) -> None:
        for stream in self._streams.values():
            if stream.cache is not None:
                stream.cache.put(changes)

    def _forget(self, client_id: str, request_id: str) -> None:
        ids = self._requests_of.get(client_id)
        if ids is not None:
            ids.discard(request_id)
            if not ids:
                del self._requests_of[client_id]

    def _end_all(self) -> None:
        """End every unfinished request with an error: this engine will never do it."""
        for request_id, local in self._local.items():
            local.put((dead_delta(request_id),))
        for client_id, request_ids in list(self._requests_of.items()):
            ends = [(client_id, dead_delta(request_id)) for request_id in request_ids]
            self._deliver(StepResult(finished=ends), self._load)
        self.end_streams()

    async def _call(self, function: Callable[[], T]) -> T:
        answer: Future[T] = Future()

        def command() -> None:
            # Done even if the caller was cancelled: an abort must be, and what a submission added ends with its stream.
            result: T | None = None
            failure: Exception | None = None
            try:
                result = function()
            except Exception as error:
                failure = error
            if not answer.set_running_or_notify_cancel():
                return
            if failure is not None:
                answer.set_exception(failure)
            else:
                answer.set_result(cast("T", result))

        self._post(command)
        return await asyncio.wrap_future(answer)

    def _post(self, command: Command) -> None:
        with self._lock:
            if self._thread is None or self._has_ended:
                raise EngineDeadError(f"the engine is not running: {self._failure!r}")
            self._commands.append(command)
            self._progress.asked()
        self._core.wake.set()

    # ---- the thread's side

    def _try_add(self, request: GenerateRequest) -> RequestRefusedError | None:
        if self._is_draining:
            return RequestRefusedError("the worker is being drained and takes no more requests", code="draining")
        try:
            self._core.add_request(request)
        except RequestRefusedError as refusal:
            return refusal
        return None

    def _run_commands(self) -> None:
        """Do what was asked for; a command that raises ends the engine, but none behind it is left unanswered."""
        with self._lock:
            commands, self._commands = self._commands, []
            self._progress.begin_turn()
        for command in commands:
            try:
                command()
            except Exception as error:
                logger.exception("a command failed")
                self._failure = self._failure or error

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._core.wake.clear()
                self._run_commands()
                if self._failure is not None:
                    break
                self._core.collect()
                if self._moves_out:
                    self._core.move_out()
                if self._core.has_work():
                    result = self._core.step()
                    self._to_loop(self._deliver, result, self._load_feed.after_step(), self._core.cache_changes())
                    self._progress.end_turn(is_stuck=self._core.is_stuck())
                else:
                    if not self._core.has_unfinished():
                        self._core.rest()
                    self._to_loop(self._deliver, NOTHING_NEW, self._load_feed.now(), self._core.cache_changes())
                    self._progress.end_turn(is_stuck=self._core.is_stuck())
                    self._progress.rest()
                    self._core.wake.wait(self._core.scheduler.idle_timeout_s())
        except Exception as error:
            logger.exception("the engine's loop failed")
            self._failure = error
        finally:
            with self._lock:
                self._has_ended = True
            self._run_commands()
            if self._failure is not None:
                self._to_loop(self._end_all)

    def _to_loop(self, function: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            logger.info("the event loop is gone; the engine stops")
            self._is_stopping = True
