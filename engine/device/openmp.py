"""How the team of OpenMP threads behaves that torch and our kernels compute with. To be set before torch is loaded.

Free of torch, for the runtime reads these variables when it is loaded, once.
"""

from __future__ import annotations

import os
import sys

SPIN_COUNT = 2000
"""So often a thread looks whether there is more to do before it sleeps. The runtime's own number is 300,000:
milliseconds, in which the other processes of a machine, the router first of all, wait for the core.

Tokens/s of an engine with two threads on two cores (125 M Llama in bfloat16, 1 and 8 requests of 128 + 64 tokens).
Alone with 300,000 / 2,000 / 1,000 / 500: 76 / 77 / 67 / 66 and 362 / 370 / 342 / 312. Beside others that wanted both
cores as well, with 300,000 / 10,000 / 2,000 / 500: 6 / 18 / 24 / 38 and 36 / 94 / 122 / 184."""

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
