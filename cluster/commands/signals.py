"""Ctrl-C, SIGTERM and a closed terminal as one exception, so that one ``finally`` stops everything."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal asked this process to stop. Not an ``Exception``, so that no handler on the way swallows it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number

    @property
    def exit_code(self) -> int:
        """The exit code that shells expect from a process that a signal ended."""
        return 128 + self.signal_number


def raise_stopped(signal_number: int, _frame: FrameType | None) -> None:
    """A signal handler that raises ``Stopped``. Further signals are ignored, so that they do not interrupt the stop."""
    _ignore_all()
    raise Stopped(signal_number)


def _ignore_all() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def stop_on_signals() -> None:
    """Install the handlers. Call it again after a library has installed its own.

    Under `nohup`, where SIGHUP is ignored, closing the terminal does not stop the process.
    """
    for number in STOP_SIGNALS:
        if not (number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN):
            signal.signal(number, raise_stopped)


def leave(exit_code: int) -> NoReturn:
    """End this process after its exit handlers, without the interpreter's normal shutdown.

    If a signal interrupted a library, such as Ray during its start, the library's native threads may crash when the
    shutdown frees objects that they use.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader is gone, or the stream is closed
            stream.flush()
    os._exit(exit_code)


@contextmanager
def holding_signals() -> Iterator[None]:
    """Delay a stop until the end of uninterruptible work, such as imports: some swallow a handler's exception."""
    held: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: held.append(number))
        for number in STOP_SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if held:
        raise_stopped(held[0], None)


@contextmanager
def ending_event_loops() -> Iterator[None]:
    """Stop everything that runs in this block on a signal, including event loops: they log all exceptions of their
    callbacks and go on, except for ``SystemExit`` and ``KeyboardInterrupt``.

    Use it for loops whose work can be dropped. For a loop that must clean up, use :func:`run_until_stopped`.

    Raises:
        Stopped: A signal came.
    """
    came: list[int] = []

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        _ignore_all()
        came.append(number)
        raise SystemExit(128 + number)

    before = {
        number: signal.signal(number, end) for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    except BaseException:
        if came:  # even if the exception was swallowed or replaced on the way
            raise Stopped(came[0]) from None
        raise
    finally:
        if not came:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def ignoring_signals() -> Iterator[None]:
    """Ignore signals during a bounded piece of clean-up."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def run_until_stopped(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await ``coroutine``. When a signal comes, cancel it, and wait until it has cleaned up.

    Raising in a signal handler would not do: in an event loop that only ends the task that happens to run.

    Raises:
        Stopped: A signal came.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(coroutine)
    came: list[int] = []

    def stop(number: int) -> None:
        if not came:
            task.cancel()
        came.append(number)

    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if came:
            raise Stopped(came[0]) from None
        raise
