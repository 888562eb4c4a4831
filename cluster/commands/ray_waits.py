"""Ends the main thread's waits in Ray when a signal comes or Ray is gone. A call to a Ray that is gone neither returns
nor fails, and of all exceptions that a signal handler can raise, only KeyboardInterrupt passes through Ray's code.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import NoReturn

from cluster.commands.exits import EXIT_FAILURE, fail
from cluster.commands.signals import STOP_SIGNALS, Stopped
from cluster.deploy.ray_home import RayHome

WATCH_PERIOD_S = 1.0
GONE_SIGNAL = signal.SIGUSR1
"""The signal that this process sends to itself when Ray is gone. A wait in Ray checks for signals once a second."""

RELEASE_TIMEOUT_S = 10.0
"""How long the main thread may take to notice. In some calls to a raylet that hangs it never does."""

STANDS_STILL = "Ray stopped answering while the cluster started; the machine may be too busy: try again later"


class RayEndedError(Exception):
    """Ray ended while something waited for it."""


@contextmanager
def ending_waits(home: RayHome | None = None, *, period_s: float = WATCH_PERIOD_S) -> Iterator[None]:
    """Interrupt waits of the main thread. Use it after Ray has installed its own signal handlers. With a ``home``,
    another thread watches that Ray.

    Raises:
        Stopped: A signal came; further ones are ignored.
        RayEndedError: The Ray of ``home`` is gone.
    """
    came: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
        if number in STOP_SIGNALS:
            for other in STOP_SIGNALS:
                signal.signal(other, signal.SIG_IGN)
        came.append(number)
        raise KeyboardInterrupt

    numbers = [GONE_SIGNAL, *(n for n in STOP_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN)]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        with _watched(home, period_s) if home is not None else nullcontext():
            yield
    except (KeyboardInterrupt, Exception) as error:
        stop = next((number for number in came if number in STOP_SIGNALS), None)
        if stop is not None:
            raise Stopped(stop) from error
        if came:
            raise RayEndedError from error
        raise
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is interrupt:
                signal.signal(number, handler)


@contextmanager
def _watched(home: RayHome, period_s: float) -> Iterator[None]:
    """Interrupts the main thread once the Ray of ``home`` is gone, but only within this block."""
    is_over = threading.Event()
    lock = threading.Lock()
    main_thread_id = threading.get_ident()

    def watch() -> None:
        while not is_over.wait(period_s):
            if home.is_there():
                continue
            with lock:
                if not is_over.is_set():
                    signal.pthread_kill(main_thread_id, GONE_SIGNAL)
            if not is_over.wait(RELEASE_TIMEOUT_S):
                code = fail(f"{STANDS_STILL} (logs: {home.logs})", EXIT_FAILURE)
                try:
                    home.kill()
                finally:
                    os._exit(code)
            return

    watcher = threading.Thread(target=watch, name="ray-watch", daemon=True)
    try:
        try:
            watcher.start()  # the signal may come before this returns
            yield
        finally:
            with lock:
                is_over.set()
    finally:
        is_over.set()  # the signal may have come while the lock was waited for
        if watcher.is_alive():
            watcher.join()
