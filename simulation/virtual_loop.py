"""An event loop whose time jumps to the next timer. Nothing sleeps, and the same program gives the same run."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Executor
from contextvars import Context
from typing import Any, NoReturn, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

RESOLUTION_S = 1e-9
"""Timers this close to each other are due together, so that rounding errors of sums cannot separate them."""

NUM_BEFORE_COLLECTION = 200_000
"""Threshold of the garbage collector: how many new objects until it looks for cycles among them."""


class VirtualDeadlockError(RuntimeError):
    """All tasks wait, and no timer or callback is left that could wake one."""

    def __init__(self, *, now_s: float) -> None:
        super().__init__(f"nothing is ready and no timer is set at virtual time {now_s:.6f} s: nothing can ever happen")


class RealWaitError(RuntimeError):
    """Code asked for something that takes real time: a thread, a socket, a process."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: in virtual time code can only wait for timers and what they trigger")


class _Jump:
    """Takes the place of the base class's selector. Instead of waiting it advances the time."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout_s: float | None) -> Sequence[object]:
        """Advance the time by the timeout."""
        self._loop.jump(timeout_s)
        return ()


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks and timers as any event loop does, in the order in which they are due; begins at time 0.

    It belongs to one thread, and refuses everything that takes real time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._clock_resolution = RESOLUTION_S
        self._selector = _Jump(self)
        self._owner = threading.get_ident()

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now_s

    def jump(self, seconds: float | None) -> None:
        """Advance the time. None: there is no timer to advance to.

        Raises:
            VirtualDeadlockError: There is no timer, so nothing can ever happen.
        """
        if seconds is None:
            raise VirtualDeadlockError(now_s=self._now_s)
        self._now_s += max(seconds, 0.0)

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Like ``call_soon``, but only for this loop's own thread.

        Raises:
            RealWaitError: Another thread calls; it runs in real time.
        """
        if threading.get_ident() != self._owner:
            raise RealWaitError("a call from another thread")
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts) -> NoReturn:  # noqa: ARG002
        """Refuse."""
        raise RealWaitError("a call in another thread")

    def _process_events(self, event_list: Sequence[object]) -> None:
        """Called by the base class with what ``select`` returned, which is nothing."""

    def _write_to_self(self) -> None:
        """Called by the base class to end a wait; nothing ever waits here."""

    async def create_connection(self, *_: Any, **options: Any) -> NoReturn:  # noqa: ARG002
        """Refuse."""
        raise RealWaitError("a connection")

    async def create_server(self, *_: Any, **options: Any) -> NoReturn:  # noqa: ARG002
        """Refuse."""
        raise RealWaitError("a server")

    async def create_datagram_endpoint(self, *_: Any, **options: Any) -> NoReturn:  # noqa: ARG002
        """Refuse."""
        raise RealWaitError("a socket")

    async def subprocess_exec(self, *_: Any, **options: Any) -> NoReturn:  # noqa: ARG002
        """Refuse."""
        raise RealWaitError("a process")

    async def subprocess_shell(self, *_: Any, **options: Any) -> NoReturn:  # noqa: ARG002
        """Refuse."""
        raise RealWaitError("a process")


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time that begins at 0.

    Raises:
        VirtualDeadlockError: It waits for something that cannot happen.
        RealWaitError: It waits for something that takes real time.
    """
    with _rare_collections(), asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Run the garbage collector less often. It took a tenth of the time, since many objects live long."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], NUM_BEFORE_COLLECTION), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
