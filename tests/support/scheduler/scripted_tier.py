"""A tier under a test's control: its decisions are real, its content is in a list, and loads end when the test says
so."""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.connector import ConnectorOrders, LoadOrder
from kv_transfer.layout import KVCacheGroup, KVLayout
from kv_transfer.params import PeerIdentity
from kv_transfer.peer.lease import LeaseTable
from kv_transfer.tier.scheduler_connector import TierSchedulerConnector
from tests.support.kv.listed_storage import ListedStorage


class ScriptedTier:
    """Keeps ``num_slots`` evicted blocks of ``kv``. Copies are made when ordered; loads write when they end."""

    def __init__(
        self, kv: list[list[int]], *, num_slots: int, block_size: int, windows: Sequence[int | None] = (None,)
    ) -> None:
        layout = KVLayout(
            model_hash="none",
            groups=tuple(KVCacheGroup(layers=(layer,), window=window) for layer, window in enumerate(windows)),
            num_kv_heads=1,
            head_dim=1,
            block_size=block_size,
            dtype="int",
            bytes_per_element=8,
        )
        self._leases = LeaseTable(ttl_s=1e9, clock=lambda: 0.0)
        self.scheduler = TierSchedulerConnector(
            identity=PeerIdentity(engine_id="tier", incarnation="1"),
            layout=layout,
            leases=self._leases,
            storage=ListedStorage(num_slots),
        )
        self.open_loads: dict[str, LoadOrder] = {}
        self._kv = kv
        self._slots: list[list[int]] = [[] for _ in range(num_slots)]

    def take_in(self, orders: ConnectorOrders) -> None:
        """Copy what was evicted, and open the loads."""
        for store in orders.stores:
            for block_id, slot in zip(store.block_ids, store.slots, strict=True):
                self._slots[slot] = list(self._kv[block_id])
        for load in orders.loads:
            assert load.request_id not in self.open_loads, "one load a request"
            self.open_loads[load.request_id] = load

    def end_load(self, request_id: str) -> Sequence[int]:
        """Write the current content of the slots, release them, and return the blocks that were written; empty if there
        is no such load.
        """
        load = self.open_loads.pop(request_id, None)
        if load is None:
            return ()
        for slot, block_id in zip(load.source_block_ids, load.block_ids, strict=True):
            self._kv[block_id] = list(self._slots[slot])
        self._leases.complete(load.params.lease_id, reader="the tier")
        self.scheduler.leases_ended(self._leases.take_ended())
        return load.block_ids
