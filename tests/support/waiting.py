"""Waits for states that nothing reports."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_TIMEOUT_S = 120.0


def wait_until(is_true: Callable[[], bool]) -> None:
    """Poll until a condition holds; fail if it does not within ``WAIT_TIMEOUT_S``."""
    deadline_s = time.monotonic() + WAIT_TIMEOUT_S
    while not is_true():
        assert time.monotonic() < deadline_s, f"not true within {WAIT_TIMEOUT_S} s"
        time.sleep(0.001)
