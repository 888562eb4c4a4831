"""Rules that keep the code readable: sizes, docstrings, and top-level names that only we use."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from cluster.serve.graph import PACKAGES as SERVED
from tests.support.cluster.side_by_side import LONGEST, NUM_PARITY_PARTS, PARITY, SHARED

ROOT = Path(__file__).parents[1]
PACKAGES = ("cluster", "simulation", "prefill", "decode", "kv_transfer", "router", "engine")
CHECKED = (*PACKAGES, "tests", "benchmarks", "scripts")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_MODULES = 16

LONG_FILES: dict[str, str] = {}
"""Files that may be longer, each with the reason."""

LONG_FUNCTIONS: dict[str, str] = {
    "engine/attention/paged_decode.py:_attend_parts": "a kernel, whose 28 parameters take a line each",
    "engine/layers/triton_ops.py:_place_heads": "a kernel, whose 26 parameters take a line each",
}
"""Functions (``path:name``) that may be longer, each with the reason."""


CATALOGUES = {
    "engine/model/architectures": "a file an architecture, each read by itself; the registry lists them",
}
"""Folders that may have more modules, each with the reason."""


HOLDERS = (ast.stmt, ast.excepthandler, ast.match_case)
"""Nodes that may hold a function."""


def python_files() -> list[Path]:
    return [file for folder in CHECKED for file in sorted((ROOT / folder).rglob("*.py"))]


def functions_of(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions of a file, however deep; no expression holds one, and most of a tree are expressions."""
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        nodes += [child for child in ast.iter_child_nodes(node) if isinstance(child, HOLDERS)]


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("file", python_files(), ids=name_of)
def test_file_has_a_docstring_and_the_right_size(file: Path) -> None:
    source = file.read_text()
    tree = ast.parse(source)

    assert ast.get_docstring(tree) or not tree.body, "no docstring"
    num_lines = len(source.splitlines())
    assert num_lines <= MAX_FILE_LINES or name_of(file) in LONG_FILES, f"{num_lines} lines"
    long = {
        f"{name_of(file)}:{function.name}": length
        for function in functions_of(tree)
        if (length := (function.end_lineno or 0) - function.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert not set(long) - set(LONG_FUNCTIONS), long


def test_exceptions_are_still_needed() -> None:
    for name in LONG_FILES:
        assert len((ROOT / name).read_text().splitlines()) > MAX_FILE_LINES, f"{name} needs no exception any more"
    for entry in LONG_FUNCTIONS:
        name, function_name = entry.split(":")
        lengths = [
            (function.end_lineno or 0) - function.lineno + 1
            for function in functions_of(ast.parse((ROOT / name).read_text()))
            if function.name == function_name
        ]
        assert max(lengths) > MAX_FUNCTION_LINES, f"{entry} needs no exception any more"


@pytest.mark.parametrize(
    "folder", sorted({file.parent for package in PACKAGES for file in (ROOT / package).rglob("*.py")}), ids=name_of
)
def test_folder_can_be_read_at_a_glance(folder: Path) -> None:
    modules = [file.name for file in folder.glob("*.py") if file.name != "__init__.py"]

    assert len(modules) <= MAX_MODULES or name_of(folder) in CATALOGUES


@pytest.mark.parametrize(
    "package", sorted({path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks", "scripts"})
)
def test_a_package_is_named_wherever_packages_are(package: str) -> None:
    """Or it is not checked, not installed, lacks in the image, or is not seen by an update."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    contracts = project["importlinter"]["contracts"]
    places: dict[str, Iterable[str]] = {
        "PACKAGES in tests/test_code_shape.py": PACKAGES,
        "PACKAGES in cluster/serve/graph.py": (*SERVED, "simulation"),
        "CODE in Makefile": re.findall(r"^CODE := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split(),
        "deploy/Dockerfile": re.findall(r"^COPY (\w+) \1$", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE),
        "deploy/Dockerfile.dockerignore": (ROOT / "deploy/Dockerfile.dockerignore")
        .read_text()
        .replace("!", "")
        .split(),
        "tool.setuptools.packages.find": project["setuptools"]["packages"]["find"]["include"],
        "tool.ruff.lint.isort": project["ruff"]["lint"]["isort"]["known-first-party"],
        "tool.mypy": project["mypy"]["packages"],
        "tool.importlinter": project["importlinter"]["root_packages"],
        "the first of its contracts": " ".join(contracts[0]["layers"]).split(),
    }
    assert [place for place, names in places.items() if package not in names] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_package_init_holds_a_docstring_only(package: str) -> None:
    assert len(ast.parse((ROOT / package / "__init__.py").read_text()).body) == 1


def test_fixtures_of_a_folder_end_with_it() -> None:
    """A folder without ``__init__.py`` is no package to pytest: its fixtures would live until the last test of all."""
    shared = [path for path in (ROOT / "tests").rglob("conftest.py") if 'scope="package"' in path.read_text()]

    assert shared
    assert [path.parent.name for path in shared if not path.with_name("__init__.py").exists()] == []


def test_clusters_are_shared_only_where_one_process_runs_all_tests() -> None:
    """Otherwise each process that runs tests of clusters would start them."""
    folders = (ROOT / "tests" / "e2e", ROOT / "tests" / "faults")

    assert [file.parent for folder in folders for file in folder.rglob("conftest.py")] == [SHARED]


def test_what_is_begun_first_exists() -> None:
    assert [unit for unit in LONGEST if not (ROOT / unit.partition(" ")[0]).exists()] == []
    assert [unit for unit in LONGEST if PARITY in unit] == [f"{PARITY} {part}" for part in range(NUM_PARITY_PARTS)]


@pytest.mark.parametrize("package", PACKAGES)
def test_each_top_level_name_has_one_owner_in_the_environment(package: str) -> None:
    assert {owner for owner, names in names_in_the_environment() if package in names} == {"baton-serve"}


@cache
def names_in_the_environment() -> list[tuple[str, set[str]]]:
    """The top-level names of each distribution, with that distribution's own."""
    distributions = importlib.metadata.distributions()
    return [(distribution.metadata["Name"], top_level_names(distribution)) for distribution in distributions]


def top_level_names(distribution: importlib.metadata.Distribution) -> set[str]:
    """The top-level packages of a distribution, by its own list and by its files."""
    declared = distribution.read_text("top_level.txt") or ""
    installed = {file.parts[0] for file in distribution.files or () if file.suffix == ".py"}
    return {*declared.split(), *(name.removesuffix(".py") for name in installed)}
