"""What `baton drain` says while it waits."""

from __future__ import annotations

import pytest

from cluster.commands.clients.worker_orders import progress

ROW = {"num_running": 3, "num_waiting": 0, "num_leased_blocks": 7}
NOTHING = dict.fromkeys(ROW, 0)


@pytest.mark.parametrize(
    ("row", "limit_s", "text"),
    [
        (ROW, None, "3 requests run, 7 KV blocks still leased to other workers"),
        (
            ROW,
            600.0,
            "3 requests run, 7 KV blocks still leased to other workers; what is left after 590 s is cut off and "
            "continues on other workers",
        ),
        (NOTHING, 5.0, "it ends; what is left after 0 s is cut off and continues on other workers"),
        (NOTHING, None, "it ends"),
    ],
)
def test_what_the_worker_still_has_and_until_when(row: dict[str, int], limit_s: float | None, text: str) -> None:
    assert progress(row, passed_s=10.0, limit_s=limit_s) == text
