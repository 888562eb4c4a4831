"""What every process of a cluster does first: load its modules, and configure its log."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"


@contextmanager
def loading() -> Iterator[None]:
    """For imports. The garbage collector is off meanwhile, and later never scans what was loaded, since that stays.

    Measured with torch and the engine on 2 cores: 14 % of the time that the imports take.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def configure_worker_logging() -> None:
    """Send the log of all packages to standard error, which Ray keeps in a file for each process. Idempotent.

    It uses the original stream, because Serve replaces ``sys.stderr`` by a buffer that is lost with its process.
    """
    root = logging.getLogger("baton")
    if root.handlers:
        return
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(logging.Formatter(FORMAT))
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False
