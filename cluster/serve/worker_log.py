"""Logging inside the cluster's processes."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"


def configure_worker_logging() -> None:
    """Send the log of all rooms to standard error, which Ray keeps in a file for each process. Idempotent.

    To the original stream: Serve replaces ``sys.stderr`` by a buffer that is lost with its process.
    """
    root = logging.getLogger("baton")
    if root.handlers:
        return
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(logging.Formatter(FORMAT))
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False
