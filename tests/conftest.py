"""Fixtures that tests of several folders share; each is made once per session."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling

    from tests.support.engine.oracle_cases import OracleCase

NAMED_TESTS = tuple(Path(__file__).with_name(name) for name in ("cluster", "gpu"))
"""Tests that need what not every machine has, to be run by name.

`make test-cluster`: tests that make hosts need root and minutes. `make test-gpu`: these need CUDA.
"""


_HOME = tempfile.TemporaryDirectory(prefix="baton-home-", ignore_cleanup_errors=True)
# What a cluster that is killed leaves in its home is not left in the user's; compiled code is shared with it.
os.environ.setdefault("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
os.environ["HOME"] = _HOME.name

NEEDS_ROOT = Path(__file__).parent / "e2e" / "test_other_user.py"
"""Tests that become another user; only root can."""

NEEDS_BROWSER = (
    Path(__file__).parent / "e2e" / "shared" / "test_live_page.py",
    Path(__file__).parent / "router" / "live" / "test_page_in_a_browser.py",
)
"""Tests that drive Debian's chromium (tests/support/router/browser.py)."""


@pytest.hookimpl(trylast=True)  # after the terminal's
def pytest_configure(config: pytest.Config) -> None:
    """Let a run in several processes print failures at once."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and config.getoption("dist", "no") != "no":
        from tests.support.failures_at_once import FailuresAtOnce

        config.pluginmanager.register(FailuresAtOnce(terminal))


def pytest_unconfigure() -> None:
    """Remove the tests' own home, and collect garbage once.

    After this hook pytest collects five times, to report exceptions of destructors. With the surviving objects frozen
    these collections take no time; otherwise each takes a second.
    """
    _HOME.cleanup()
    gc.collect()
    gc.freeze()


def pytest_report_header() -> list[str]:
    """Say what this user cannot run."""
    root = Path(__file__).parents[1]
    missing = []
    if os.geteuid() != 0:
        missing.append(f"NOT RUN: {NEEDS_ROOT.relative_to(root)}, which becomes another user and so needs root")
    if not _has_browser():
        names = " and ".join(str(file.relative_to(root)) for file in NEEDS_BROWSER)
        missing.append(f"NOT RUN: {names}, which need Debian's chromium: python -m tests.support.router.browser")
    return missing


def _has_browser() -> bool:
    from tests.support.debian_packages import CHROMIUM

    return CHROMIUM.exists()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the tests that have to be named, unless they are, and those that this user cannot run."""
    if collection_path == NEEDS_ROOT and os.geteuid() != 0:
        return True
    if collection_path in NEEDS_BROWSER and not _has_browser():
        return True
    if collection_path not in NAMED_TESTS:
        return None
    named = [Path(argument.partition("::")[0]).absolute() for argument in config.args]
    return None if any(path.is_relative_to(collection_path) for path in named) else True


CLUSTER_FOLDERS = tuple(Path(__file__).with_name(name) for name in ("e2e", "faults"))
"""Their tests start clusters."""

CLUSTER_TEST_TIMEOUT_S = 1800
"""A test that starts a cluster may take so long: on a busy machine the start alone takes minutes. Its waits are shorter
(`READY_TIMEOUT_S`, `START_TIMEOUT_S`), and tell what did not come."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests of clusters time, and begin with the longest."""
    from tests.support.cluster.side_by_side import place_in_order, unit_of

    for item in items:
        if any(map(item.path.is_relative_to, CLUSTER_FOLDERS)) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(CLUSTER_TEST_TIMEOUT_S))
    items.sort(key=lambda item: place_in_order(unit_of(item.nodeid)))


def pytest_collection_finish() -> None:
    """Look for garbage less often, and never among the tests themselves and all that they import: more than a million
    objects, half a second each time.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


@pytest.hookimpl(optionalhook=True)  # a run in one process may do without xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """Let one process run all tests of a cluster, where tests run in several."""
    if config.getoption("dist") != "loadgroup":
        return None
    from tests.support.cluster.side_by_side import ClusterScheduling

    return ClusterScheduling(config, log)


# How long an example takes, to make or to test, says something of the machine, not of the code.
hypothesis.settings.register_profile("baton", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("baton")


@pytest.fixture(scope="session")
def oracle_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], OracleCase]:
    """The case of an architecture; transformers is asked once for each."""
    from tests.support.engine.oracle_cases import (
        make_case,  # imported late: it loads torch, which most rooms do without
    )

    cases: dict[str, OracleCase] = {}

    def case(architecture: str) -> OracleCase:
        if architecture not in cases:
            cases[architecture] = make_case(tmp_path_factory.mktemp(architecture), architecture)
        return cases[architecture]

    return case


@pytest.fixture(scope="session")
def served_model(oracle_case: Callable[[str], OracleCase]) -> Path:
    """A small random model, for whose prompts we know what transformers says."""
    return oracle_case("llama").path


_WATCHED = ("BATON_", "CUDA_", "HF_", "HOME", "NIXL_", "OMP_", "PATH", "PYTHON", "TMPDIR", "UCX_")
"""Variables by how their names begin. Others are set by libraries when they are first imported."""

_OF_TORCH = "CUDA_MODULE_LOADING"
"""Set by some versions of torch when they first use a GPU."""


def _surroundings() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_WATCHED) and not name.startswith(_OF_TORCH)
    }


_ROOT = Path(__file__).parent.parent
_OF_TOOLS = (".", "__pycache__")
"""What tools keep beside the code, by how their names begin: caches, the environment."""


def _entries() -> set[str]:
    return {path.name for path in _ROOT.iterdir() if not path.name.startswith(_OF_TOOLS)}


_AT_FIRST = _surroundings()
_ENTRIES_AT_FIRST = _entries()
_blamed_threads: set[threading.Thread] = set()


def _forget_num_threads() -> None:
    torch, number = sys.modules.get("torch"), os.environ.get("OMP_NUM_THREADS")
    if torch is not None and number is not None and torch.get_num_threads() != int(number):
        torch.set_num_threads(int(number))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """When the tests of a folder are done, no variable, thread or file of theirs may meet those of the next one; and no
    file's tests compute with the threads that those of another one asked for: three processes of two each get nowhere.
    """
    yield
    if nextitem is not None and nextitem.path != item.path:
        _forget_num_threads()
    if nextitem is not None and nextitem.path.parent == item.path.parent:
        return
    left = dict(set(_surroundings().items()) ^ set(_AT_FIRST.items()))
    threads = {thread for thread in threading.enumerate() if thread.name.startswith("baton-kv-")} - _blamed_threads
    _blamed_threads.update(threads)
    files = _entries() - _ENTRIES_AT_FIRST
    _ENTRIES_AT_FIRST.update(files)
    assert not left, f"tests of {item.path.parent} left the environment changed: {left}"
    assert not threads, f"tests of {item.path.parent} left connectors open: {[thread.name for thread in threads]}"
    assert not files, f"tests of {item.path.parent} left in {_ROOT}: {files}"
