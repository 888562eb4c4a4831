"""The thread that owns an engine: it builds and steps it, and runs other threads' commands between steps."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from itertools import takewhile
from typing import NamedTuple, Protocol, TypeVar, cast

from engine.contract.errors import EngineDeadError, EngineStalledError
from engine.contract.messages import CacheChanges, LoadReport
from engine.frontend.engine_core import EngineCore
from engine.frontend.feeds import LoadFeed
from engine.frontend.os_threads import CoreWaits, os_thread_name
from engine.frontend.progress import Progress
from engine.scheduler.step_result import NOTHING_NEW, StepResult

logger = logging.getLogger(f"baton.{__name__}")

STEP_TIMEOUT_S = 30.0
"""The default limit for a step; `health.step_timeout_s` in a cluster."""

SUSPICION = 0.1
"""The share of that limit from which on it matters whether the engine's threads have cores."""

T = TypeVar("T")
Command = Callable[[EngineCore], None]


class Posted(NamedTuple):
    """A command that waits for the engine's thread; ``is_arrival``: it only adds requests, so it may run in a step."""

    run: Command
    is_arrival: bool = False


class StepListener(Protocol):
    """Gets the results of an engine's steps."""

    def on_step(self, core: EngineCore, result: StepResult, load: LoadReport, changes: CacheChanges | None) -> None:
        """A step's result, or that of a turn that computed nothing; called by the engine's thread."""

    def on_end(self) -> None:
        """The engine failed, and no more results come. Called on the event loop."""


class EngineThread:
    """The only thread that touches an engine.

    It builds the engine, so that everything bound to a thread (OpenMP thread teams, CUDA's current device) is bound to
    the one that computes. Others give it functions of the engine (:meth:`call`, :meth:`post`), which it runs in order,
    between two steps. Only arrivals of requests may come within a step, between two of its layers, so that their KV is
    loaded while the step computes. It passes each step's result to ``listener``, which must not block.

    An engine counts as stalled when its thread has been in one turn for ``step_timeout_s``, or when its requests have
    waited that long with nothing under way that could let them start. ``clock`` measures this; it may stand still while
    the process gets no CPU time. The time in which the engine is built does not count, nor does that in which a thread
    that computes waits for a core: these threads stand back for all others, and a busy machine is no hanging engine.
    """

    def __init__(
        self,
        build: Callable[[], EngineCore],
        listener: StepListener,
        *,
        name: str,
        step_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._build = build
        self._listener = listener
        self._name = name
        self._step_timeout_s = step_timeout_s
        self._core: EngineCore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._commands: list[Posted] = []
        self._is_stopping = False
        self._has_ended = False
        self._failure: BaseException | None = None
        self._progress = Progress(clock)
        self._os_name = f"engine {name}"
        self._core_waits = CoreWaits(self._os_name)
        self.moves_out = False
        """If set, every turn from now on ends running requests with a hand-over, and waiting ones unserved."""

    async def start(self) -> LoadReport:
        """Build the engine and begin to step it. Must be called on the event loop that will use the engine.

        Returns:
            The engine's first load report.

        Raises:
            Exception: What ``build`` raised.
        """
        self._loop = asyncio.get_running_loop()
        built: Future[LoadReport] = Future()
        self._thread = threading.Thread(target=self._run, args=(built,), name=f"baton-{self._name}", daemon=True)
        self._thread.start()
        return await asyncio.wrap_future(built)

    async def stop(self) -> None:
        """End the thread after its present turn. Idempotent."""
        self._is_stopping = True
        if self._core is not None:
            self._core.wake.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    async def release(self) -> None:
        """Close the connector of a stopped engine. Idempotent."""
        if self._core is not None:
            await asyncio.to_thread(self._core.close)

    @property
    def core(self) -> EngineCore:
        """The engine, for those of its methods that any thread may call.

        Raises:
            EngineDeadError: It was not built.
        """
        if self._core is None:
            raise EngineDeadError("the engine is not running")
        return self._core

    @property
    def has_ended(self) -> bool:
        """True when the thread takes no more functions."""
        return self._has_ended

    @property
    def is_stalled(self) -> bool:
        """True when there is work but no step has ended for ``step_timeout_s``."""
        return self._busy_s() > self._step_timeout_s

    def _busy_s(self) -> float:
        """``Progress.busy_s`` without the threads' waits for cores, which are looked up once the limit comes nearer."""
        busy_s, since_s = self._progress.busy_s, self._progress.busy_since_s
        if since_s is not None and busy_s > SUSPICION * self._step_timeout_s:
            busy_s -= self._core_waits.since(since_s)
        return busy_s

    def check_health(self) -> None:
        """Return if the engine can serve; otherwise raise.

        Raises:
            EngineDeadError: Its thread ended, or was never started.
            EngineStalledError: It made no step for too long while it had work.
        """
        if self._failure is not None:
            raise EngineDeadError(f"the engine's loop stopped: {self._failure!r}")
        if self._core is None or self._thread is None or not self._thread.is_alive():
            raise EngineDeadError("the engine is not running")
        if (busy_s := self._busy_s()) > self._step_timeout_s:
            raise EngineStalledError(busy_s=busy_s, step_timeout_s=self._step_timeout_s)

    async def call(self, function: Callable[[EngineCore], T], *, is_arrival: bool = False) -> T:
        """Have the thread run ``function`` on the engine; returns its result. It runs even if the caller is cancelled.

        With ``is_arrival`` it only adds requests, and need not wait for the end of a step.

        Raises:
            EngineDeadError: The thread did not accept it.
            Exception: What ``function`` raised.
        """
        answer: Future[T] = Future()

        def command(core: EngineCore) -> None:
            # Run even if the caller was cancelled: an abort must happen, and submitted requests end with their stream.
            result: T | None = None
            failure: Exception | None = None
            try:
                result = function(core)
            except Exception as error:
                failure = error
            if not answer.set_running_or_notify_cancel():
                return
            if failure is not None:
                answer.set_exception(failure)
            else:
                answer.set_result(cast("T", result))

        self.post(command, is_arrival=is_arrival)
        return await asyncio.wrap_future(answer)

    def post(self, command: Command, *, is_arrival: bool = False) -> None:
        """Have the thread run ``command``; if it raises, the engine ends.

        Raises:
            EngineDeadError: The thread did not accept it.
        """
        with self._lock:
            if self._core is None or self._has_ended:
                raise EngineDeadError(f"the engine is not running: {self._failure!r}")
            self._commands.append(Posted(command, is_arrival))
            self._progress.asked()
        self._core.wake.set()

    # ---- the thread's side

    def _run(self, built: Future[LoadReport]) -> None:
        with os_thread_name(self._os_name):
            self._build_and_step(built)

    def _build_and_step(self, built: Future[LoadReport]) -> None:
        built.set_running_or_notify_cancel()
        try:
            core = self._build()
            load_feed = LoadFeed(core)
        except BaseException as error:
            self._failure, self._has_ended = error, True
            built.set_exception(error)
            return
        core.take_arrivals = partial(self._take_arrivals, core)
        self._core = core
        built.set_result(load_feed.now())
        try:
            while not self._is_stopping:
                core.wake.clear()
                self._run_commands(core)
                if self._failure is not None:
                    break
                self._take_turn(core, load_feed)
        except Exception as error:
            logger.exception("the engine's loop failed")
            self._failure = error
        finally:
            core.pause()
            with self._lock:
                self._has_ended = True
            self._run_commands(core)
            if self._failure is not None:
                self.to_loop(self._listener.on_end)

    def _run_commands(self, core: EngineCore) -> None:
        """Run the waiting commands. A command that raises ends the engine, but every later one is still answered."""
        with self._lock:
            commands, self._commands = self._commands, []
            self._progress.begin_turn()
        self._run_all(commands, core)

    def _take_arrivals(self, core: EngineCore) -> None:
        """Within a step: add the requests that came, unless a command before them waits for its end, and load KV."""
        if not self._commands:
            return
        with self._lock:
            arrivals = list(takewhile(lambda command: command.is_arrival, self._commands))
            del self._commands[: len(arrivals)]
        if arrivals:
            self._run_all(arrivals, core)
            core.begin_loads()

    def _run_all(self, commands: Iterable[Posted], core: EngineCore) -> None:
        for command in commands:
            try:
                command.run(core)
            except Exception as error:
                logger.exception("a command failed")
                self._failure = self._failure or error

    def _take_turn(self, core: EngineCore, load_feed: LoadFeed) -> None:
        """Make a step if there is work; otherwise report the load, and wait for something to do."""
        core.collect()
        if self.moves_out:
            core.move_out()
        if core.has_work():
            result = core.step()
            self._listener.on_step(core, result, load_feed.after_step(), core.cache_changes())
            self._progress.end_turn(is_stuck=core.is_stuck())
            return
        core.pause()
        if not core.has_unfinished():
            core.rest()
        self._listener.on_step(core, NOTHING_NEW, load_feed.now(), core.cache_changes())
        self._progress.end_turn(is_stuck=core.is_stuck())
        self._progress.rest()
        core.wake.wait(core.scheduler.idle_timeout_s())

    def to_loop(self, function: Callable[..., None], *args: object) -> None:
        """Have the event loop that called :meth:`start` run a function soon. To be called by the engine's thread."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            logger.info("the event loop was closed; the engine stops")
            self._is_stopping = True
