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
import pytest
from tests.support.cluster.side_by_side import ClusterScheduling
from tests.support.failures_at_once import FailuresAtOnce

def pytest_xdist_make_scheduler(config, log):
    config.pluginmanager.register(FailuresAtOnce(config.pluginmanager.get_plugin("terminalreporter")))
    return ClusterScheduling(config, log)
"""
TEST_FILE = """
import os
import pytest

@pytest.mark.parametrize("number", range({count}))
def test_it(number):
    if number == {crashes_at}:
        os._exit(1)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("file", "number"), [(0, 0), (0, LAST), (2, 3), (NUM_FILES - 1, 0), (NUM_FILES - 1, LAST)])
def test_a_crash_fails_one_test_and_the_run_ends(tmp_path: Path, file: int, number: int) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for place in range(NUM_FILES):
        crashes_at = number if place == file else None
        text = TEST_FILE.format(count=TESTS_PER_FILE, crashes_at=crashes_at)
        (tmp_path / f"test_number_{place}.py").write_text(text)
    options = ["--dist", "loadgroup", "--no-loadscope-reorder", "--numprocesses", "2", "--rootdir", str(tmp_path)]
    plugins = ["-p", "no:schemathesis", "-p", "no:langsmith_plugin", "-p", "no:anyio", "-p", "no:cacheprovider"]

    run = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, *options, str(tmp_path)],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert f"1 failed, {NUM_FILES * TESTS_PER_FILE - 1} passed" in run.stdout, run.stdout + run.stderr
    told = f"crashed while running 'test_number_{file}.py::test_it[{number}]'"
    assert run.stdout.count(told) == 2, "at once, and at the end"
