"""What the scheduler's half promises and orders."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_transfer.connector import NO_ORDERS, LeaseEnd, LoadOrder
from kv_transfer.params import PROTOCOL_VERSION, KVTransferParams, PeerIdentity
from kv_transfer.peer.lease import LeaseTable
from kv_transfer.peer.scheduler_connector import PeerSchedulerConnector
from kv_transfer.protocols import RemoteMatch
from tests.support.engine.kv_engine import KVEngineSpec

LAYOUT = KVEngineSpec(engine_id="any").layout
OURS = PeerIdentity(engine_id="ours", incarnation="1")
PARAMS = KVTransferParams(
    protocol_version=PROTOCOL_VERSION,
    source=PeerIdentity(engine_id="theirs", incarnation="1"),
    lease_id="lease",
    layout_hash=LAYOUT.layout_hash,
    block_ids=((10, 11, 12),),
    num_tokens=9,
)
NOTHING = RemoteMatch(num_tokens=0)


def _make_connector() -> PeerSchedulerConnector:
    return PeerSchedulerConnector(identity=OURS, layout=LAYOUT, leases=LeaseTable(ttl_s=1.0, clock=lambda: 0.0))


def _match(
    connector: PeerSchedulerConnector, params: KVTransferParams | None, num_local_tokens: int = 0
) -> RemoteMatch | None:
    return connector.match(request_id="r", params=params, num_prompt_tokens=9, num_local_tokens=num_local_tokens)


@pytest.mark.known_failure(10)
@pytest.mark.parametrize(
    "changes",
    [
        {"protocol_version": PROTOCOL_VERSION + 1},
        {"layout_hash": "another"},
        {"source": OURS},
        {"block_ids": ((10, 11),)},
        {"block_ids": ()},
        {"block_ids": ((10, 11, 12), (13, 14, 15))},
        {"num_tokens": 100},
    ],
)
def test_hand_over_that_cannot_be_used_supplies_nothing(changes: dict[str, object]) -> None:
    """Blocks that do not cover the prompt are refused, not believed."""
    connector = _make_connector()

    assert _match(connector, replace(PARAMS, **changes)) == NOTHING
    connector.expect(replace(PARAMS, **changes))
    assert connector.take_orders() is NO_ORDERS


def test_hand_over_supplies_what_is_not_here_already() -> None:
    connector = _make_connector()

    assert _match(connector, PARAMS) == RemoteMatch(num_tokens=9)
    assert _match(connector, PARAMS, num_local_tokens=4) == RemoteMatch(num_tokens=5)
    assert _match(connector, PARAMS, num_local_tokens=9) == NOTHING
    assert _match(connector, None) == NOTHING


def test_one_lease_is_good_for_one_load() -> None:
    connector = _make_connector()
    connector.begin_load(request_id="r", params=PARAMS, first_block=1, block_ids=((7, 8),))

    assert _match(connector, PARAMS) == NOTHING
    connector.release(PARAMS)
    orders = connector.take_orders()
    assert orders.loads == (LoadOrder(request_id="r", params=PARAMS, source_block_ids=(11, 12), block_ids=(7, 8)),)
    assert orders.releases == ()


def test_cancel_of_a_load_that_ended_does_not_hit_the_next_one_of_its_request() -> None:
    """A request that is aborted as its load ends, and comes back at once, waits for a load of its own."""
    connector = _make_connector()
    connector.cancel_load("r")
    connector.cancel_load("another")
    connector.begin_load(request_id="r", params=PARAMS, first_block=0, block_ids=((7, 8, 9),))

    assert connector.take_orders().cancelled_loads == ("another",)


def test_release_is_ordered_once() -> None:
    connector = _make_connector()
    connector.release(PARAMS)
    connector.release(PARAMS)

    assert connector.take_orders().releases == (PARAMS,)
    assert connector.take_orders() is NO_ORDERS


def test_own_hand_over_that_comes_back_ends_its_lease_here() -> None:
    """An engine does not connect to itself: nobody would deliver the message."""
    leases = LeaseTable(ttl_s=1.0, clock=lambda: 0.0)
    connector = PeerSchedulerConnector(identity=OURS, layout=LAYOUT, leases=leases)
    params = connector.grant_lease(request_id="r", block_ids=((1, 2),), num_tokens=8)

    connector.release(params)
    connector.release(replace(params, source=replace(OURS, incarnation="0"), lease_id="of an earlier life"))

    assert [ended.reason for ended in leases.take_ended()] == [LeaseEnd.ABORTED]
    assert connector.take_orders() is NO_ORDERS


def test_load_of_blocks_beyond_the_hand_over_is_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        _make_connector().begin_load(request_id="r", params=PARAMS, first_block=2, block_ids=((7, 8),))
