"""What a scheduler counts of its loads, counted again."""

from __future__ import annotations

from engine.scheduler.requests.row_table import NEVER
from engine.scheduler.scheduler import Scheduler


def check_loads(scheduler: Scheduler) -> None:
    """Every load in flight counts once, wanted or not; the gaps of those that wait for one hold."""
    remote = scheduler._remote
    assert remote.num_loading == len(remote.loading())
    assert remote.num_loading_blocks == sum(load.num_blocks for load in remote._loads.values())
    assert remote.tightest_gap == min([request.promised_gap for request in remote.loading()], default=NEVER)
