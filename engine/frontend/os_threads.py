"""Threads as the system sees them (`top -H`, /proc), on Linux: names, and waits for cores. Free of torch."""

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


class CoreWaits:
    """How long threads of one name could have run, but had no core: other threads and processes had them."""

    def __init__(self, name: str) -> None:
        self._name = name[:MAX_LENGTH]
        self._moment: float | None = None
        self._before: dict[str, float] = {}

    def since(self, moment: float) -> float:
        """Seconds that these threads have waited since the first call with this ``moment``, when whatever is measured
        began; another moment starts anew. Of several threads the longest wait counts, because a team waits for its
        last one. 0 where the system does not tell.
        """
        if moment != self._moment:
            self._moment, self._before = moment, self._all_s()
        before = self._before
        return max((waited_s - before.get(thread, 0.0) for thread, waited_s in self._all_s().items()), default=0.0)

    def _all_s(self) -> dict[str, float]:
        waits_s: dict[str, float] = {}
        with contextlib.suppress(OSError):
            for task in Path("/proc/self/task").iterdir():
                with contextlib.suppress(OSError):  # it ended just now
                    if (task / "comm").read_text().strip() == self._name:
                        waits_s[task.name] = 1e-9 * int((task / "schedstat").read_text().split()[1])
        return waits_s
