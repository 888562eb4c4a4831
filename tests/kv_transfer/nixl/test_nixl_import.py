"""Importing NIXL does not change the rest of the process."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import logging, logging.config, logging.handlers
from tests.support.kv.light_nixl import import_nixl_without_torch

handler = logging.handlers.MemoryHandler(1, target=logging.StreamHandler())
logging.getLogger("somebody").addHandler(handler)
before = logging.config.dictConfig, logging.raiseExceptions
import_nixl_without_torch()
assert handler.target is not None, "the handler of somebody else was closed"
assert (logging.config.dictConfig, logging.raiseExceptions) == before
assert not logging.getLogger("nixl").handlers
"""


def test_log_handlers_of_others_stay_open() -> None:
    """Serve kills a worker that cannot say where it logs, and asks when its controller was started again."""
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)

    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
