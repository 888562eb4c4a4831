"""The worker's half of a chain: it passes each source its orders, and reports the parts of a load as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kv_transfer.connector import (
    NO_EVENTS,
    ConnectorEvents,
    ConnectorOrders,
    LeaseEnded,
    LoadEnded,
    PeerWorkerConnector,
    WorkerConnector,
)
from kv_transfer.params import Hello
from kv_transfer.peer.counters import TransferCounters
from kv_transfer.stats import TransferStats, counters_of

_COUNTERS = counters_of(TransferStats)


@dataclass(slots=True)
class _OpenLoad:
    """One request's load: the number of parts that have not ended, and the results of the others.

    ``ended`` holds each result with the position of its source in the chain. Parts may end in any order.
    """

    num_open: int = 0
    ended: list[tuple[int, LoadEnded]] = field(default_factory=list)
    has_stalled: bool = False

    def joined(self) -> LoadEnded:
        """One event for all parts, in the order of their blocks. The parts ran in parallel."""
        parts = [part for _, part in sorted(self.ended, key=lambda entry: entry[0])]
        errors = [part.error for part in parts if part.error is not None]
        return LoadEnded(
            request_id=parts[0].request_id,
            failed_block_ids=tuple(block_id for part in parts for block_id in part.failed_block_ids),
            num_bytes=sum(part.num_bytes for part in parts),
            duration_s=max(part.duration_s for part in parts),
            error="; ".join(errors) or None,
            is_cancelled=any(part.is_cancelled for part in parts),
        )


class ChainWorker:
    """Implements ``PeerWorkerConnector``. ``peers`` is the source that moves blocks between engines."""

    def __init__(self, sources: Sequence[WorkerConnector], *, peers: PeerWorkerConnector) -> None:
        self.sources = tuple(sources)
        self.peers = peers
        self._loads: dict[str, _OpenLoad] = {}
        self._counters = TransferCounters()

    @property
    def is_alive(self) -> bool:
        """False once any source is dead: the KV that it could supply is lost."""
        return all(source.is_alive for source in self.sources)

    @property
    def has_hung_read(self) -> bool:
        """True while any source has a hung read."""
        return any(source.has_hung_read for source in self.sources)

    def execute(self, orders: ConnectorOrders) -> None:
        """Start what was ordered. All sources copy evicted blocks before any source begins to load, because loads run
        in threads of their own and may overwrite these blocks."""
        if orders.is_empty:
            return
        for part in orders.parts:
            for load in part.loads:
                self._loads.setdefault(load.request_id, _OpenLoad()).num_open += 1
        pairs = list(zip(self.sources, orders.parts, strict=True))
        for source, part in pairs:
            if part.stores:
                source.execute(ConnectorOrders(stores=part.stores))
        for source, part in pairs:
            source.execute(replace(part, stores=()))

    def collect(self) -> ConnectorEvents:
        """Take what ended; a load ends with the last of its parts."""
        loads: list[LoadEnded] = []
        leases: list[LeaseEnded] = []
        stalled: list[str] = []
        ended_streams: list[str] = []
        for place, source in enumerate(self.sources):
            events = source.collect()
            leases.extend(events.leases)
            ended_streams.extend(events.ended_streams)
            stalled.extend(request_id for request_id in events.stalled if self._is_first_stall(request_id))
            for part in events.loads:
                loads.extend(self._end_part(place, part))
        joined = ConnectorEvents(
            loads=tuple(loads), leases=tuple(leases), stalled=tuple(stalled), ended_streams=tuple(ended_streams)
        )
        return NO_EVENTS if joined.is_empty else joined

    def stats(self) -> TransferStats:
        """The sums over all sources. A load in several parts counts once, when it is collected."""
        stats = [source.stats() for source in self.sources]
        return TransferStats(
            **{
                name: getattr(self._counters, name) if told.is_of_loads else sum(getattr(part, name) for part in stats)
                for name, told in _COUNTERS.items()
            },
            tiers={name: of_tier for part in stats for name, of_tier in part.tiers.items()},
        )

    def accept(self, hello: Hello) -> Hello:
        """Let the peer source handle a peer's introduction.

        Raises:
            HandshakeRefusedError: Protocol version or layout differ.
        """
        return self.peers.accept(hello)

    def close(self) -> None:
        """Close every source. Idempotent."""
        for source in self.sources:
            source.close()

    def _is_first_stall(self, request_id: str) -> bool:
        load = self._loads.get(request_id)
        if load is None or load.has_stalled:
            return False
        load.has_stalled = True
        self._counters.num_stalled_loads += 1
        return True

    def _end_part(self, place: int, part: LoadEnded) -> list[LoadEnded]:
        load = self._loads.get(part.request_id)
        if load is None:
            return [part]  # the scheduler counts it as unknown
        load.ended.append((place, part))
        load.num_open -= 1
        if load.num_open:
            return []
        del self._loads[part.request_id]
        joined = load.joined()
        self._counters.add_load(joined)
        return [joined]
