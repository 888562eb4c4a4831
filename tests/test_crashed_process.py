"""A process of the test run that crashes takes one test with it: the run tells which, runs all others, and ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster.side_by_side import ROOT

NUM_FILES, TESTS_PER_FILE = 5, 6
LAST = TESTS_PER_FILE - 1

CONFTEST = """
import os
from pathlib import Path
from tests.support.cluster.side_by_side import ClusterScheduling
from tests.support.failures_at_once import FailuresAtOnce
from tests.support.waiting import wait_until

HERE = Path(__file__).parent
FIRST_REPLACEMENT = "gw2"

def pytest_xdist_make_scheduler(config, log):
    config.pluginmanager.register(FailuresAtOnce(config.pluginmanager.get_plugin("terminalreporter")))
    return ClusterScheduling(config, log)

def pytest_testnodedown(node):
    (HERE / f"{node.gateway.id} is down").touch()

def pytest_collection_finish():
    if os.environ.get("PYTEST_XDIST_WORKER") == FIRST_REPLACEMENT:
        (HERE / "a replacement collects").touch()
        wait_until(lambda: len(list(HERE.glob("* is down"))) >= {num_crashes})
"""
TEST_FILE = """
import os
from pathlib import Path
import pytest
from tests.support.waiting import wait_until

@pytest.mark.parametrize("number", range({count}))
def test_it(number):
    if number == {crashes_at}:
        if {waits}:
            wait_until(Path(__file__).with_name("a replacement collects").exists)
        os._exit(1)
"""


def run_with_crashes(folder: Path, *crashes: tuple[int, int]) -> str:
    """What a run of two processes prints, in which tests of these files and numbers end their process: the second one
    while the replacement of the first one's process collects its tests.
    """
    (folder / "conftest.py").write_text(CONFTEST.replace("{num_crashes}", str(len(crashes))))
    numbers = dict(crashes)
    for place in range(NUM_FILES):
        waits = len(crashes) > 1 and place == crashes[1][0]
        text = TEST_FILE.format(count=TESTS_PER_FILE, crashes_at=numbers.get(place), waits=waits)
        (folder / f"test_number_{place}.py").write_text(text)
    options = ["--dist", "loadgroup", "--no-loadscope-reorder", "--numprocesses", "2", "--rootdir", str(folder)]
    plugins = ["-p", "no:schemathesis", "-p", "no:langsmith_plugin", "-p", "no:anyio", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, *options, str(folder)],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    return run.stdout + run.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "crashes",
    [
        [(0, 0)],
        [(0, LAST)],
        [(2, 3)],
        [(NUM_FILES - 1, 0)],
        [(NUM_FILES - 1, LAST)],
        [(0, 0), (1, 0)],
    ],
)
def test_crashes_fail_a_test_each_and_the_run_ends(tmp_path: Path, crashes: list[tuple[int, int]]) -> None:
    printed = run_with_crashes(tmp_path, *crashes)

    assert f"{len(crashes)} failed, {NUM_FILES * TESTS_PER_FILE - len(crashes)} passed" in printed, printed
    for file, number in crashes:
        told = f"crashed while running 'test_number_{file}.py::test_it[{number}]'"
        assert printed.count(told) == 2, "at once, and at the end"
