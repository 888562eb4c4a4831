"""Shares the work of compiling among the processes of a machine: each kernel is compiled by one, the others load it.

Workers that start together want the same kernels. What one of them compiles the others leave to it, and go on with
what nobody compiles yet.
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from engine.kernels.compiled import FOLDER

Kernel = partial[int]
"""What compiles a kernel and returns its address, or returns that of one that is compiled; with its arguments."""

PATIENCE_S = 60.0
"""Several times what the slowest kernel takes."""

POLL_PERIOD_S = 0.02

_wanted: dict[str, Kernel] = {}
"""What is wanted and may not be compiled yet, by name."""

_compiled: set[str] = set()
"""The names of what this process has."""


def want(kernel: Kernel) -> None:
    """Have the next ``compile_wanted`` compile a kernel."""
    name = name_of(kernel)
    if name not in _compiled:
        _wanted.setdefault(name, kernel)


def compile_wanted(*, patience_s: float = PATIENCE_S) -> None:
    """Compile all that is wanted, and what another process compiles meanwhile behind that."""
    while _wanted:
        left = [kernel for kernel in list(_wanted.values()) if not compile_now(kernel, patience_s=0.0)]
        if left:
            compile_now(left[0], patience_s=patience_s)


def compile_now(kernel: Kernel, *, patience_s: float = PATIENCE_S) -> bool:
    """Compile a kernel, or load it, after another process that compiles it has done so.

    Returns:
        False where one is at it and we do not wait for that. Behind ``patience_s`` we compile it as well: that process
        may stand still.
    """
    name = name_of(kernel)
    deadline_s = time.monotonic() + patience_s
    while name not in _compiled:
        with _turn(kernel.func.__qualname__) as is_ours:
            if is_ours or (patience_s > 0 and time.monotonic() >= deadline_s):
                kernel()
                _compiled.add(name)
                break
        if not patience_s:
            return False
        time.sleep(POLL_PERIOD_S)
    _wanted.pop(name, None)
    return True


def name_of(kernel: Kernel) -> str:
    """What tells a kernel from all others of this process."""
    return f"{kernel.func.__module__}.{kernel.func.__qualname__} {kernel.args} {sorted(kernel.keywords.items())}"


@contextmanager
def _turn(name: str) -> Iterator[bool]:
    """Hold the lock of what makes kernels; yields False if another process has it.

    Those that it makes of other arguments take the same lock: numba lists all of them in one file, and who writes that
    while another process does drops what that has added. Where there is no folder that keeps kernels, or locks cannot
    be had in it, everybody compiles.
    """
    with contextlib.ExitStack() as held:
        is_free = True
        with contextlib.suppress(OSError):
            if FOLDER is not None:
                lock = held.enter_context((FOLDER / f"{name}.lock").open("wb"))
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    is_free = False
        yield is_free
