"""Names of threads as the system shows them (`top -H`, /proc), where Linux keeps them. Free of torch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

MAX_LENGTH = 15
"""Of a name, in bytes: the kernel cuts off what is longer."""


@contextlib.contextmanager
def os_thread_name(name: str) -> Iterator[None]:
    """This thread is called so, and so are the threads that it starts meanwhile: they take their starter's name.

    So all threads of a team of OpenMP's bear the name of the thread that computes with them. Elsewhere than on Linux
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
