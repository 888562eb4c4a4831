"""Which tests of clusters run in one process, where several processes run them (`--dist loadgroup`).

xdist's own groups do nothing with pytest 9.2: it writes a test's group into ``Item._nodeid``, which pytest no longer
reads, so that every test is a group of its own and every process starts every cluster.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parents[3]

SHARED_CLUSTERS = frozenset({"cluster", "wide_cluster"})
"""Fixtures of tests/e2e/conftest.py. A file may have one of the same name for itself."""


class ClusterScheduling(LoadScopeScheduling):
    """Gives a process all tests of a file at once, and all files whose tests share clusters."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "shared clusters" if shares_clusters(ROOT / file) else file


@cache
def shares_clusters(file: Path) -> bool:
    """Whether a test or a fixture of the file asks for a cluster that is not its own."""
    functions = [
        node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    asked = {
        argument.arg
        for function in functions
        if function.name.startswith("test_") or function.decorator_list
        for argument in function.args.args
    }
    return not SHARED_CLUSTERS.isdisjoint(asked - {function.name for function in functions})
