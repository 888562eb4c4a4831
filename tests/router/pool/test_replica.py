"""What a router derives from a worker's report and from what it sent there itself."""

from __future__ import annotations

import pytest

from engine.contract.messages import LoadReport
from router.pool.replica import Reservation
from tests.support.router.balance_world import BLOCK_SIZE, replica_of


def test_prompts_of_other_routers_that_wait_will_take_memory() -> None:
    """Their own routers have reserved it for them, which other routers do not know."""
    waiting = LoadReport(num_blocks=100, num_free_blocks=100, num_waiting=2, queued_prefill_tokens=10 * BLOCK_SIZE + 1)
    replica = replica_of("decode-0", waiting, now_s=0.0)
    assert replica.promised_usage == pytest.approx(0.11)
    assert replica.num_available_blocks == 100, "who asks for room is not refused for them"

    own = Reservation(replica, num_blocks=8, num_tokens=128, num_rows=1, notify=lambda: None)
    assert replica.promised_usage == pytest.approx(0.11), "what waits there may be ours"
    more = Reservation(replica, num_blocks=12, num_tokens=192, num_rows=1, notify=lambda: None)
    assert replica.promised_usage == pytest.approx(0.20)
    for reservation in (own, more):
        reservation.release()
    assert replica.promised_usage == pytest.approx(0.11)
