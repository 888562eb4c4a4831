"""Files that only this user may read: how to write them, and how to check them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

OWNER_ONLY = 0o600


def write_private(path: Path, content: bytes) -> None:
    """Write a new file that only this user may read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY), "wb") as file:
        file.write(content)


def mode_open_to_others(path: Path) -> int | None:
    """The mode of a file if other users can read or write it; None if they cannot, or if there is no file.

    A file of another owner, such as a mounted secret, may be readable for our group.
    """
    try:
        state = path.stat()
    except OSError:
        return None
    forbidden = stat.S_IRWXG | stat.S_IRWXO if state.st_uid == os.geteuid() else stat.S_IRWXO
    return stat.S_IMODE(state.st_mode) if state.st_mode & forbidden else None
