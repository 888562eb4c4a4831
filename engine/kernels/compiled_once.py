"""Shares compilation among the processes of a machine: one process compiles a kernel, the others load it.

Workers that start together want the same kernels. A worker skips a kernel that another one is compiling, and compiles
one that nobody is working on.
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
"""Compiles a kernel, or loads it if it is compiled, and returns its address; with its arguments bound."""

PATIENCE_S = 60.0
"""How long to wait for another process: several times what the slowest kernel takes."""

POLL_PERIOD_S = 0.02

_wanted: dict[str, Kernel] = {}
"""Kernels that are wanted and may not be compiled yet, by name."""

_compiled: set[str] = set()
"""Names of the kernels that this process has compiled or loaded."""


def want(kernel: Kernel) -> None:
    """Register a kernel for the next ``compile_wanted``."""
    name = name_of(kernel)
    if name not in _compiled:
        _wanted.setdefault(name, kernel)


def compile_wanted(*, patience_s: float = PATIENCE_S) -> None:
    """Compile all registered kernels. Those that another process is compiling come last, and are loaded from it."""
    while _wanted:
        left = [kernel for kernel in list(_wanted.values()) if not compile_now(kernel, patience_s=0.0)]
        if left:
            compile_now(left[0], patience_s=patience_s)


def compile_now(kernel: Kernel, *, patience_s: float = PATIENCE_S) -> bool:
    """Compile a kernel, or load it once another process has compiled it.

    Returns:
        False if another process is compiling it and ``patience_s`` is 0. With patience, we wait that long and then
        compile it as well, since that process may hang.
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
    """A name of the kernel that is unique within this process."""
    return f"{kernel.func.__module__}.{kernel.func.__qualname__} {kernel.args} {sorted(kernel.keywords.items())}"


@contextmanager
def _turn(name: str) -> Iterator[bool]:
    """Hold the lock of the function that makes a kernel; yields False if another process has it.

    Kernels of one function share a lock, whatever their arguments: numba lists them in one index file, and two
    processes that write it at once lose entries. Without a cache folder or file locks, every process compiles.
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
