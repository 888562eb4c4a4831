"""Redis on this machine's end of the bridge: Ray's head stores its state there, so that the state outlives the head."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.hosts import DIES_WITH_US
from tests.cluster.network import OPERATOR

PORT = 6390
PASSWORD = "for-tests-only"


@contextmanager
def running_redis(folder: Path) -> Iterator[str]:
    """Yields the address of a Redis that leaves nothing behind. The bridge must exist."""
    command = [
        *DIES_WITH_US,
        *("redis-server", "--bind", str(OPERATOR), "--port", str(PORT), "--requirepass", PASSWORD),
        *("--save", "", "--appendonly", "no", "--dir", str(folder)),
    ]
    with (folder / "redis.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield f"{OPERATOR}:{PORT}"
    finally:
        process.terminate()
        process.wait(30)
