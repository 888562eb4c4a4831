"""Processes that lost their parent."""

from __future__ import annotations

import subprocess
import sys

WITH_AN_ORPHAN = """
import os, signal, subprocess, sys

from cluster.deploy.started_processes import StartedProcesses, kill_all

SLEEPER = "import signal; signal.pause()"
ORPHAN = f"subprocess.Popen([sys.executable, '-c', {SLEEPER!r}], stdout=subprocess.DEVNULL)"
PARENT = f"import subprocess, sys; print({ORPHAN}.pid)"
before = subprocess.Popen([sys.executable, "-c", SLEEPER])
started = StartedProcesses()
orphan = int(subprocess.run([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, check=True).stdout)
print([process.pid == orphan for process in started()])
kill_all(started())
print(started(), before.poll())
before.kill()
"""


def test_a_process_is_found_after_its_parent_ended() -> None:
    done = subprocess.run([sys.executable, "-c", WITH_AN_ORPHAN], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines() == ["[True]", "[] None"]
