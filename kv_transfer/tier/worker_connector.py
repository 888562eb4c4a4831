"""The worker's half of every tier: it stores evicted blocks at once, and loads blocks as if from a peer."""

from __future__ import annotations

from dataclasses import replace

from kv_transfer.connector import NO_EVENTS, ConnectorEvents, ConnectorOrders, LoadOrder
from kv_transfer.peer.worker_connector import TransferWorker
from kv_transfer.stats import TransferStats
from kv_transfer.tier.scheduler_connector import TierSchedulerConnector
from kv_transfer.tier.storage import TierStorage


class TierWorker:
    """Implements ``WorkerConnector``. ``name`` is the tier's name, as in the names of its counters.

    Evicted blocks are copied in the engine's thread, before the step that reuses them computes or reads anything. So no
    block is held, and nothing waits for the copy. If the storage has checksums, loads are verified.
    """

    def __init__(
        self, *, name: str, reader: TransferWorker, scheduler: TierSchedulerConnector, storage: TierStorage
    ) -> None:
        self._name = name
        self._reader = reader
        self._scheduler = scheduler
        self.storage = storage

    @property
    def is_alive(self) -> bool:
        """False once the thread that loads has ended."""
        return self._reader.is_alive

    @property
    def has_hung_read(self) -> bool:
        """True while a copy out of the tier hangs."""
        return self._reader.has_hung_read

    def execute(self, orders: ConnectorOrders) -> None:
        """Copy evicted blocks, then start the loads."""
        for store in orders.stores:
            self.storage.store(store)
        self._reader.execute(replace(orders, stores=(), loads=tuple(map(self._with_checksums, orders.loads))))

    def collect(self) -> ConnectorEvents:
        """Take what ended since the last call. Ended leases and lost content are handled here, in the tier."""
        self._scheduler.slots_lost(self.storage.take_lost())
        events = self._reader.collect()
        if events.is_empty:
            return NO_EVENTS
        self._scheduler.leases_ended(events.leases)
        return replace(events, leases=())

    def stats(self) -> TransferStats:
        """Counters since the start. The tier's leases and handshakes are internal, and not counted."""
        stats, scheduler, block_bytes = self._reader.stats(), self._scheduler, self._reader.hello.block_bytes
        stats = replace(
            stats,
            num_leases_granted=0,
            num_leases_done=0,
            num_leases_expired=0,
            num_leases_aborted=0,
            num_handshakes=0,
        )
        own = {
            "hit_blocks": scheduler.num_hit_blocks,
            "stored_blocks": scheduler.num_stored_blocks,
            "stored_bytes": scheduler.num_stored_blocks * block_bytes,
            "loaded_blocks": stats.num_blocks,
            "loaded_bytes": stats.num_bytes,
            "evicted_blocks": scheduler.slots.num_evicted,
            "evicted_bytes": scheduler.slots.num_evicted * block_bytes,
            "refused_blocks": scheduler.num_refused_blocks,
        }
        return replace(stats, tiers={self._name: {**own, **self.storage.counters()}})

    def close(self) -> None:
        """Stop the threads. Idempotent."""
        self._reader.close()

    def _with_checksums(self, order: LoadOrder) -> LoadOrder:
        return replace(order, checksums=self.storage.checksums(order.source_block_ids))
