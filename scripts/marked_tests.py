"""Which tests carry a mark: read from the files, so that nothing needs to be imported."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"


@cache
def marked_tests(mark: str) -> Mapping[Any, list[str]]:
    """The tests that carry each argument of ``pytest.mark.<mark>``, as ``path::name`` below tests/, sorted.

    The files are read once: that takes most of a second.
    """
    found = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for argument, test in _marks_of(path, f"pytest.mark.{mark}"):
            found[argument].append(test)
    return {argument: sorted(tests) for argument, tests in found.items()}


def _marks_of(path: Path, mark: str) -> Iterator[tuple[Any, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == mark:
                for argument in decorator.args:
                    yield ast.literal_eval(argument), f"{path.relative_to(TESTS)}::{node.name}"
