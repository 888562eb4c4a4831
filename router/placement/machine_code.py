"""The loops of placement: plain Python for few replicas, compiled machine code for many.

Among two replicas a choice takes Python some 30 microseconds, among 256 a hundred times as long. So for many replicas
numba compiles the same functions, with bit-identical results. Compiling takes seconds in a thread of its own, and until
it ends Python makes the choices. Processes with few replicas never load numba.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple, cast

import numpy as np

from router.placement import fleet, hosts, plans, prediction
from router.placement.fleet import Column, Standing, Standings
from router.placement.plans import Costs, Way
from router.placement.prediction import Wish

MANY = 16
"""From this number of replicas on machine code is faster, including the cost of passing it arrays."""

PYTHON_S = 8e-6
COMPILING_S = 10.0
"""Approximate seconds: of a choice in Python, for each replica; and of compiling."""

logger = logging.getLogger(f"baton.{__name__}")


class Loops(NamedTuple):
    """The functions that a choice calls; see :mod:`router.placement.plans`."""

    prepare: Callable[[Standings, float], None]
    assess: Callable[[Standings, Wish, Column, Costs], None]
    best_way: Callable[[Standings, Wish, Column, Costs], Way]
    best_prompt: Callable[[Standings, Wish, Column, Costs], int]
    best_split: Callable[[Standings, Wish, Column, Costs, int], Way]


PLAIN = Loops(plans.prepare, plans.assess, plans.best_way, plans.best_prompt, plans.best_split)


class MachineCode:
    """Compiles the loops on first use. One object a process, since compiling takes seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiling: threading.Thread | None = None
        self._compiled: Loops | None = None
        self._num_holding_off = 0

    def is_for(self, num_replicas: int) -> bool:
        """True if a choice among ``num_replicas`` should use machine code, and it is ready; may start compiling it."""
        if num_replicas < MANY:
            return False
        if self._compiled is None and self._compiling is None and not self._num_holding_off:
            with self._lock:
                if self._compiling is None:
                    self._compiling = threading.Thread(target=self._compile, name="compile choice", daemon=True)
                    self._compiling.start()
        return self._compiled is not None

    def wait(self) -> None:
        """Wait for compiling to end, if it has begun."""
        if self._compiling is not None:
            self._compiling.join()

    @contextlib.contextmanager
    def for_choices(self, num_choices: int, num_replicas: int) -> Iterator[None]:
        """Use this around many choices in a busy thread, beside which compiling would take several times as long. The
        loops are compiled first if that saves more time than it takes; otherwise they are not compiled meanwhile.
        """
        if num_choices * num_replicas * PYTHON_S > COMPILING_S:
            self.is_for(num_replicas)
            self.wait()
        self._num_holding_off += 1
        try:
            yield
        finally:
            self._num_holding_off -= 1

    def loops_of(self, standings: Standings) -> Loops:
        """The loops that fit these columns: Python for lists, machine code for arrays."""
        if isinstance(standings.host, list):
            return PLAIN
        assert self._compiled is not None, "there are arrays only once there is machine code to read them"
        return self._compiled

    def _compile(self) -> None:
        try:
            self._compiled = compiled()
        except Exception:
            logger.exception("the choice was not compiled: among many replicas it takes longer than it could")


MACHINE_CODE = MachineCode()


def compiled() -> Loops:
    """Compile the loops; takes seconds."""
    # Imported here, because it takes 60 MB and a fraction of a second.
    from numba import njit
    from numba.extending import register_jitable

    for module in (fleet, hosts, prediction, plans):
        for part in vars(module).values():
            if isinstance(part, FunctionType) and part.__module__ == module.__name__:
                register_jitable(forceinline=True, error_model="numpy")(part)
    # None of them divides by 0, and checking for that would take a fifth of machine code's time.
    loops = Loops(*(cast("Any", njit(loop, nogil=True, error_model="numpy")) for loop in PLAIN))
    _call_each(loops)
    return loops


def _call_each(loops: Loops) -> None:
    """Call each function once: the first call compiles it."""
    values = np.ones((len(Standing._fields), 2))
    standings = Standings(*cast("Any", values))
    wish, cached, costs = Wish(*[1.0] * len(Wish._fields)), np.zeros(2), Costs(*cast("Any", np.zeros((4, 2))))
    loops.prepare(standings, 1.0)
    loops.assess(standings, wish, cast("Column", cached), costs)
    loops.best_way(standings, wish, cast("Column", cached), costs)
    loops.best_prompt(standings, wish, cast("Column", cached), costs)
    loops.best_split(standings, wish, cast("Column", cached), costs, 0)
