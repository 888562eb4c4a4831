"""The worker's half of the host tier: copies what is evicted at once, and loads like a reader of any peer."""

from __future__ import annotations

from dataclasses import replace

from kv_transfer.block_memory import BlockMemory
from kv_transfer.connector import NO_EVENTS, ConnectorEvents, ConnectorOrders, LoadOrder
from kv_transfer.errors import PeerUnreachableError
from kv_transfer.host.arena import HostArena
from kv_transfer.host.scheduler_connector import HostSchedulerConnector
from kv_transfer.params import Hello
from kv_transfer.peer.worker_connector import TransferWorker
from kv_transfer.stats import TransferStats


class HostWorker:
    """Implements ``WorkerConnector``.

    Evicted blocks are copied in the engine's thread, before the step that reuses them computes or reads anything: so
    there is nothing to hold, and nothing to wait for. (Measured in benchmarks/host_tier.py: the copy and its checksum
    cost less than 1 % of computing a block.) With ``memory``, that of the arena, every copy has a checksum, which its
    load is compared with.
    """

    def __init__(
        self,
        *,
        reader: TransferWorker,
        books: HostSchedulerConnector,
        arena: HostArena,
        memory: BlockMemory | None = None,
    ) -> None:
        self._reader = reader
        self._books = books
        self.arena = arena
        self._memory = memory
        self._checksums = [0] * arena.region.num_blocks

    @property
    def is_alive(self) -> bool:
        """False once the thread that loads has ended."""
        return self._reader.is_alive

    @property
    def has_hung_read(self) -> bool:
        """True while a copy out of the tier does not end."""
        return self._reader.has_hung_read

    def execute(self, orders: ConnectorOrders) -> None:
        """Copy what was evicted, then start the loads."""
        for store in orders.stores:
            self.arena.store(store.block_ids, store.slots)
            self._remember_checksums(store.slots)
        self._reader.execute(replace(orders, stores=(), loads=tuple(map(self._with_checksums, orders.loads))))

    def collect(self) -> ConnectorEvents:
        """Take what ended since the last call; leases that ended concern the tier alone."""
        events = self._reader.collect()
        if events.is_empty:
            return NO_EVENTS
        self._books.leases_ended(events.leases)
        return replace(events, leases=())

    def stats(self) -> TransferStats:
        """Counters since the start. Leases and handshakes are the tier's own business, and not counted."""
        stats, books, block_bytes = self._reader.stats(), self._books, self.arena.region.block_bytes
        return replace(
            stats,
            num_leases_granted=0,
            num_leases_done=0,
            num_leases_expired=0,
            num_leases_aborted=0,
            num_handshakes=0,
            num_host_hit_blocks=books.num_hit_blocks,
            num_host_stored_blocks=books.num_stored_blocks,
            num_host_stored_bytes=books.num_stored_blocks * block_bytes,
            num_host_loaded_blocks=stats.num_blocks,
            num_host_loaded_bytes=stats.num_bytes,
            num_host_evicted_blocks=books.store.num_evicted,
            num_host_evicted_bytes=books.store.num_evicted * block_bytes,
            num_host_refused_blocks=books.num_refused_blocks,
        )

    def accept(self, hello: Hello) -> Hello:
        """Refuse: nobody reads from the tier.

        Raises:
            PeerUnreachableError: Always.
        """
        raise PeerUnreachableError(engine_id=hello.identity.engine_id, reason="a host tier is no peer")

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        self._reader.close()

    def _remember_checksums(self, slots: tuple[int, ...]) -> None:
        if self._memory is not None:
            for slot, checksum in zip(slots, self._memory.checksums(slots), strict=True):
                self._checksums[slot] = checksum

    def _with_checksums(self, order: LoadOrder) -> LoadOrder:
        if self._memory is None:
            return order
        return replace(order, checksums=tuple(self._checksums[slot] for slot in order.source_block_ids))
