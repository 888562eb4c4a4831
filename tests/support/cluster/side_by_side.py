"""The order in which test files run, and which of them run in one process if there are several."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parents[3]

SHARED = ROOT / "tests" / "e2e" / "shared"
"""Its tests share clusters, which one process starts and stops."""

LONGEST = (
    ROOT / "tests" / "faults",
    ROOT / "tests" / "parity" / "test_parity.py",
    SHARED,
    ROOT / "tests" / "engine" / "scheduler" / "test_scheduler_machine.py",
    ROOT / "tests" / "e2e" / "test_shared_ray.py",
    ROOT / "tests" / "integration" / "test_same_bits_compiled_or_loaded.py",
    ROOT / "tests" / "e2e" / "test_commands_on_one_ray.py",
    ROOT / "tests" / "e2e" / "test_promise_scaling.py",
    ROOT / "tests" / "e2e" / "test_bad_input.py",
    ROOT / "tests" / "e2e" / "test_two_routers.py",
    ROOT / "tests" / "e2e" / "test_scaling.py",
    ROOT / "tests" / "e2e",
)
"""The files that take longest. They begin first, since a long one that begins last would delay the end. Files with
clusters, which mostly wait, alternate with files that compute all the time.
"""


@cache
def place_in_order(file: Path) -> int:
    """The position of a file, by which files are sorted; equal ones keep their order."""
    return next((place for place, path in enumerate(LONGEST) if file.is_relative_to(path)), len(LONGEST))


class ClusterScheduling(LoadScopeScheduling):
    """Gives a process all tests of a file at once, and all files whose tests share clusters.

    xdist's own groups do nothing with pytest 9.2: it writes a test's group into ``Item._nodeid``, which pytest no
    longer reads, so that every test is a group of its own and every process starts every cluster.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return str(SHARED) if (ROOT / file).is_relative_to(SHARED) else file
