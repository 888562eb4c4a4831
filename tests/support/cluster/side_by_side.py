"""The order in which test files run, and which of them run in one process if there are several."""

from __future__ import annotations

import zlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

ROOT = Path(__file__).parents[3]

SHARED = ROOT / "tests" / "e2e" / "shared"
"""Its tests share clusters, which one process starts and stops."""

PARITY = "tests/parity/test_parity.py"
NUM_PARITY_PARTS = 3
"""The matrix takes longest of all files, so several processes share its columns."""

LONGEST = (
    "tests/faults/",
    f"{PARITY} 0",
    "tests/e2e/shared",
    f"{PARITY} 1",
    "tests/engine/scheduler/test_scheduler_machine.py",
    "tests/e2e/test_shared_ray.py",
    f"{PARITY} 2",
    "tests/integration/test_same_bits_compiled_or_loaded.py",
    "tests/e2e/test_commands_on_one_ray.py",
    "tests/e2e/test_promise_scaling.py",
    "tests/e2e/test_bad_input.py",
    "tests/e2e/test_two_routers.py",
    "tests/e2e/test_scaling.py",
    "tests/e2e/",
)
"""The beginnings of the units that take longest. They begin first, since a long one that begins last would delay the
end. Units with clusters, which mostly wait, alternate with units that compute all the time.
"""


def unit_of(nodeid: str) -> str:
    """What a process runs at once: a file, all files whose tests share clusters, or a part of the parity matrix."""
    file, _, test = nodeid.partition("::")
    if (ROOT / file).is_relative_to(SHARED):
        return str(SHARED.relative_to(ROOT))
    if file == PARITY:
        column = test.partition("-")[0]
        return f"{file} {zlib.crc32(column.encode()) % NUM_PARITY_PARTS}"
    return file


@cache
def place_in_order(unit: str) -> int:
    """The position of a unit, by which its tests are sorted; equal ones keep their order."""
    return next((place for place, beginning in enumerate(LONGEST) if unit.startswith(beginning)), len(LONGEST))


class ClusterScheduling(LoadScopeScheduling):
    """Gives a process all tests of a unit at once.

    xdist's own groups do nothing with pytest 9.2: it writes a test's group into ``Item._nodeid``, which pytest no
    longer reads, so that every test is a group of its own and every process starts every cluster.
    """

    def remove_node(self, node: WorkerController) -> str | None:
        """Give the other processes what a process that crashed has not run; the test that it ran has failed.

        xdist 3.8 also gives them what the process had finished. For that they run nothing and so ask for nothing more,
        and each keeps its last test back until it is told of a next one: the run never ends.
        """
        units = self.assigned_work.pop(node)
        left = [(scope, nodeid) for scope, unit in units.items() for nodeid, is_done in unit.items() if not is_done]
        if not left:
            return None
        for scope, nodeid in left[1:]:
            self.workqueue.setdefault(scope, {})[nodeid] = False
        for other in self.nodes:
            self._reschedule(other)
        return left[0][1]

    def _reschedule(self, node: WorkerController) -> None:
        """Give a process units until it has more than its last test, or until there are no more. One that has not told
        what it collected can be given none.
        """
        if node not in self.registered_collections:
            return
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)
