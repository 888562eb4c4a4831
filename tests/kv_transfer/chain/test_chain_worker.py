"""The worker's half of a chain: the orders that its sources get, and in which sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from kv_transfer.chain.worker_connector import ChainWorker
from kv_transfer.connector import ConnectorOrders, LoadOrder, PeerWorkerConnector, StoreOrder
from kv_transfer.params import PROTOCOL_VERSION, KVTransferParams, PeerIdentity

PARAMS = KVTransferParams(
    protocol_version=PROTOCOL_VERSION,
    source=PeerIdentity(engine_id="tier", incarnation="1"),
    lease_id="lease",
    layout_hash="layout",
    block_ids=((0,),),
    num_tokens=4,
)


class Source:
    """Notes when its stores are copied and its loads begin."""

    def __init__(self, name: str, done: list[str]) -> None:
        self._name = name
        self._done = done

    def execute(self, orders: ConnectorOrders) -> None:
        """Stores first, as every source does."""
        self._done += [f"{self._name} stores {store.block_ids}" for store in orders.stores]
        self._done += [f"{self._name} loads into {load.block_ids}" for load in orders.loads]
        self._done += [f"{self._name} cancels {request_id}" for request_id in orders.cancelled_loads]


def chain(done: list[str], names: Sequence[str]) -> ChainWorker:
    sources = cast("list[PeerWorkerConnector]", [Source(name, done) for name in names])
    return ChainWorker(sources, peers=sources[-1])


def load(request_id: str, block_id: int) -> LoadOrder:
    return LoadOrder(request_id=request_id, params=PARAMS, source_block_ids=(0,), block_ids=(block_id,))


@pytest.mark.behaviour("K9")
def test_k9_no_load_begins_before_every_tier_has_copied_what_was_evicted() -> None:
    """A block that is evicted is loaded into in the same step: a tier that came later would keep what was loaded."""
    done: list[str] = []
    evicted = StoreOrder(block_ids=(7,), slots=(0,), block_hashes=(b"old",))
    orders = ConnectorOrders(
        parts=(
            ConnectorOrders(stores=(evicted,), loads=(load("a", 7),)),
            ConnectorOrders(stores=(evicted,), loads=(load("a", 8),), cancelled_loads=("b",)),
            ConnectorOrders(loads=(load("a", 9),)),
        )
    )

    chain(done, ("host", "disk", "peer")).execute(orders)

    assert done == [
        "host stores (7,)",
        "disk stores (7,)",
        "host loads into (7,)",
        "disk loads into (8,)",
        "disk cancels b",
        "peer loads into (9,)",
    ]
