"""Environment variables that torch and its OpenMP runtime read. Set them before torch is loaded.

Does not import torch: the runtime reads its variables once, when it is loaded.
"""

from __future__ import annotations

import os
import sys

SPIN_COUNT = 30_000
"""How many times an idle thread checks for more work before it sleeps: a tenth of the runtime's default. With the
default, other processes of the machine, above all the router, wait milliseconds for a core. With a much lower count,
threads go to sleep between a step's products whenever another process delays one of them, and waking them takes longer
than the delay (`benchmarks/worker_step.py` measures it in a cluster; a lone engine does not show it).
"""

_SPINNING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")

_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""If 1, torch asks the system for 2 MiB pages for tensors of at least that size. Read at its first allocation."""


def prepare_torch(num_threads: int | None) -> None:
    """Set how threads wait between products, how many threads there are by default, and huge pages for large tensors.

    Weights that the matrix library packs are placed in memory that was freed while they were made. In 4 KiB pages each
    load scatters them differently, and decode steps, which read all of them, took up to a tenth longer after some loads
    than after others.
    Ray gives each actor ``OMP_NUM_THREADS=1``, which ``num_threads`` overrides. Settings for spinning and pages that
    are already in the environment win. The thread settings take effect only before torch is loaded, the page setting
    only before torch's first allocation.
    """
    os.environ.setdefault(_HUGE_PAGES, "1")
    if "torch" in sys.modules:
        return
    if num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
    if not any(name in os.environ for name in _SPINNING):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
