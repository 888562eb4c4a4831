"""Thread names as the system shows them (`top -H`, /proc), on Linux. Free of torch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

MAX_LENGTH = 15
"""The most bytes of a name: the kernel cuts off the rest."""


@contextlib.contextmanager
def os_thread_name(name: str) -> Iterator[None]:
    """Name this thread, and the threads that it starts meanwhile, since they inherit their starter's name.

    So all threads of an OpenMP team have the name of the thread that computes with them. On other systems than Linux
    nothing happens.
    """
    file = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
    try:
        before = file.read_text().strip()
        file.write_text(name[:MAX_LENGTH])
    except OSError:
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.write_text(before)
