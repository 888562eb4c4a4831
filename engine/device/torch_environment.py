"""What torch and the OpenMP runtime under it read from the environment. To be set before torch is loaded.

Free of torch, for the runtime reads its variables when it is loaded, once.
"""

from __future__ import annotations

import os
import sys

SPIN_COUNT = 30_000
"""So often a thread looks whether there is more to do before it sleeps: a tenth of the runtime's own number, with which
the other processes of a machine, the router first of all, wait for the core for milliseconds. With much fewer looks
threads sleep between the products of a step whenever another process delays one of them, and waking them takes longer
than the delay (`benchmarks/worker_step.py` counts it in a cluster; alone an engine shows nothing of it).
"""

_SPINNING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")

_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""With 1, torch asks the system for pages of 2 MiB for tensors of as much and more. Read at its first allocation."""


def prepare_torch(num_threads: int | None) -> None:
    """Set how large tensors lie in memory, what a team of threads does between products, and how many threads one has
    that nobody told otherwise.

    Packed weights come to lie in what was freed while they were made: in pages of 4 KiB each load scatters them anew,
    and decode steps, which read all of them, took up to a tenth longer after some loads than after others.
    Ray gives each actor ``OMP_NUM_THREADS=1``. What whoever started the process said about spinning and pages stands.
    Once torch is loaded nothing here changes threads, and once it has allocated something, nothing changes pages.
    """
    os.environ.setdefault(_HUGE_PAGES, "1")
    if "torch" in sys.modules:
        return
    if num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
    if not any(name in os.environ for name in _SPINNING):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
