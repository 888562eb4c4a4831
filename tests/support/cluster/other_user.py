"""What another user of this machine can do to a process. As root this is tried; otherwise permissions are checked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

NOBODY = 65534


def as_nobody(script: str, *arguments: str) -> str:
    """The output of a script that continues as another user. Only root can become one."""
    run = subprocess.run(
        [sys.executable, "-c", _BECOME_NOBODY + script, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return run.stdout.strip()


def segments_of(pid: int) -> list[Path]:
    """Links of a process to memory that UCX shares between processes."""
    links = [link for link in Path(f"/proc/{pid}/fd").iterdir() if "ucx_shm" in _target(link)]
    assert links, "it shares no memory"
    return links


def assert_memory_is_closed(pid: int) -> None:
    """Another user can open neither the memory of a process nor what it shares with others."""
    targets = [f"/proc/{pid}/mem", *map(str, segments_of(pid))]
    if os.geteuid() == 0:
        assert as_nobody(_TRY_TO_OPEN, *targets).split() == ["PermissionError"] * 2 * len(targets)
    else:
        assert Path(f"/proc/{pid}/fd").stat().st_mode & 0o077 == 0
        assert Path(f"/proc/{pid}/mem").stat().st_mode & 0o077 == 0


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:  # the descriptor with which the folder itself was read
        return ""


_BECOME_NOBODY = f"""
import ctypes, os, socket, sys
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
"""

_TRY_TO_OPEN = """
for path in sys.argv[1:]:
    for flags in (os.O_RDONLY, os.O_RDWR):
        try:
            os.open(path, flags)
            print("opened")
        except OSError as error:
            print(type(error).__name__)
"""
