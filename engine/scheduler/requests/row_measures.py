"""How far the running requests have come, all together. Free of torch."""

from __future__ import annotations

from typing import NamedTuple

from engine.scheduler.requests import row_passes
from engine.scheduler.requests.row_table import RowTable


class RowMeasures(NamedTuple):
    """Of running requests: the tokens that they must compute before each can take one token a step, how many can, and
    the tokens that all of them have computed."""

    num_prefill_tokens: int
    num_decoding: int
    num_context_tokens: int


def measure(table: RowTable) -> RowMeasures:
    """Measure all rows in one compiled pass."""
    return RowMeasures(*row_passes.measure(table.columns, table.order_int32))
