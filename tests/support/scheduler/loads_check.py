"""Checks a scheduler's counts of its loads."""

from __future__ import annotations

from engine.scheduler.requests.row_table import NEVER
from engine.scheduler.scheduler import Scheduler


def check_loads(scheduler: Scheduler) -> None:
    """Check that every load in flight counts once, wanted or not, and that gaps of requests that wait for one hold."""
    remote = scheduler._remote
    assert remote.num_loading == len(remote.loading())
    assert remote.num_loading_blocks == sum(load.num_blocks for load in remote._loads.values())
    assert remote.tightest_gap == min([request.promised_gap for request in remote.loading()], default=NEVER)
