"""Checks what a scheduler keeps so that it need not count, or look at all rows, in every step."""

from __future__ import annotations

from engine.scheduler.requests import row_passes
from engine.scheduler.requests.row_table import NEVER
from engine.scheduler.scheduler import Scheduler


def check_kept_state(scheduler: Scheduler) -> None:
    """Check that every load in flight counts once, wanted or not, that gaps of requests that wait for one hold, and
    that rows which were found to decode still do.
    """
    remote = scheduler._remote
    assert remote.num_loading == len(remote.loading())
    assert remote.num_loading_blocks == sum(load.num_blocks for load in remote._loads.values())
    assert remote.tightest_gap == min([request.promised_gap for request in remote.loading()], default=NEVER)
    table, budget = scheduler._table, scheduler._prompt_budget
    if budget is not None and budget._decoding_spans == table.num_spans:
        *_, first_other = row_passes.decoding(table.columns, table.order_int32, budget._cap)
        assert first_other == table.order.size
