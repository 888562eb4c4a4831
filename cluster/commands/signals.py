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
    """Somebody asked this process to stop. No ``Exception``: nothing on the way may swallow it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number

    @property
    def exit_code(self) -> int:
        """What shells expect of a process that a signal ended."""
        return 128 + self.signal_number


def raise_stopped(signal_number: int, _frame: FrameType | None) -> None:
    """A signal handler; further signals are ignored, so that stopping is not interrupted."""
    _ignore_all()
    raise Stopped(signal_number)


def _ignore_all() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def stop_on_signals() -> None:
    """Install the handlers; again after a library installed its own.

    Under `nohup`, which ignores SIGHUP for what it starts, a terminal that closes stops nothing.
    """
    for number in STOP_SIGNALS:
        if not (number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN):
            signal.signal(number, raise_stopped)


def leave(exit_code: int) -> NoReturn:
    """End this process after its exit handlers, without taking the interpreter apart.

    A library that a signal interrupted, such as Ray while it starts, may have native threads that crash when what they
    use is freed.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
            stream.flush()
    os._exit(exit_code)


@contextmanager
def holding_signals() -> Iterator[None]:
    """Stop after a piece of work that must not be interrupted, such as imports: some swallow what a handler raises."""
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
    """Stop what runs in here, event loops included, which log what their callbacks raise and go on: all but
    ``SystemExit`` and ``KeyboardInterrupt``.

    For loops whose work nobody needs any more; for one that is to clean up there is :func:`run_until_stopped`.

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
        if came:  # whatever became of it on the way
            raise Stopped(came[0]) from None
        raise
    finally:
        if not came:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def ignoring_signals() -> Iterator[None]:
    """Let a bounded piece of cleaning up finish."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def run_until_stopped(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await ``coroutine``, or cancel it when a signal comes, and wait until it has cleaned up.

    In an event loop a handler that raises ends whichever task runs just then, and no other.

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
