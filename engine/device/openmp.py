"""How the team of OpenMP threads behaves that torch and our kernels compute with. To be set before torch is loaded.

Free of torch, for the runtime reads these variables when it is loaded, once.
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


def prepare_openmp(num_threads: int | None) -> None:
    """Set what a team does between products, and how many threads one has that nobody told otherwise.

    Ray gives each actor ``OMP_NUM_THREADS=1``. What whoever started the process said about spinning stands. Once torch
    is loaded this has no effect.
    """
    if "torch" in sys.modules:
        return
    if num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
    if not any(name in os.environ for name in _SPINNING):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
