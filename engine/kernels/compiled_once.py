"""Shares the work of compiling among the processes of a machine: each kernel is compiled by one, the others load it.

Workers that start together want the same kernels. What one of them compiles the others leave to it, and go on with
what nobody compiles yet.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from engine.kernels.compiled import FOLDER

Kernel = partial[int]
"""What compiles a kernel and returns its address, or returns that of one that is compiled; with its arguments."""

_wanted: dict[str, Kernel] = {}
"""What is wanted and may not be compiled yet, by name."""

_compiled: set[str] = set()
"""The names of what this process has."""


def want(kernel: Kernel) -> None:
    """Have the next ``compile_wanted`` compile a kernel."""
    name = name_of(kernel)
    if name not in _compiled:
        _wanted.setdefault(name, kernel)


def compile_wanted() -> None:
    """Compile all that is wanted, and what another process compiles meanwhile behind that."""
    while _wanted:
        left = [kernel for kernel in list(_wanted.values()) if not compile_now(kernel, waits=False)]
        if left:
            compile_now(left[0], waits=True)


def compile_now(kernel: Kernel, *, waits: bool = True) -> bool:
    """Compile a kernel, or load it. False where another process compiles it and we do not wait for that."""
    name = name_of(kernel)
    if name in _compiled:
        return True
    with _turn(kernel.func.__qualname__, waits=waits) as is_ours:
        if is_ours:
            kernel()
            _compiled.add(name)
            _wanted.pop(name, None)
    return is_ours


def name_of(kernel: Kernel) -> str:
    """What tells a kernel from all others of this process."""
    return f"{kernel.func.__module__}.{kernel.func.__qualname__} {kernel.args} {sorted(kernel.keywords.items())}"


@contextmanager
def _turn(name: str, *, waits: bool) -> Iterator[bool]:
    """Hold the lock of what makes kernels; yields False if another process has it and we do not wait.

    Those that it makes of other arguments take the same lock: numba lists all of them in one file, and who writes that
    while another process does drops what that has added. Where there is no folder that keeps kernels, or locks cannot
    be had in it, everybody compiles.
    """
    with contextlib.ExitStack() as held:
        try:
            if FOLDER is not None:
                lock = held.enter_context((FOLDER / f"{name}.lock").open("wb"))
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass
        yield True
