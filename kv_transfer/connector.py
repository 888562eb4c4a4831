"""Between an engine and whatever moves its KV blocks: a connector in two halves.

The scheduler's half decides: it runs in the engine's thread, never blocks, and answers the questions of
``kv_transfer.protocols``. The worker's half moves bytes: it may have a thread of its own, and reports what ended. What
passes between them in a step is ``ConnectorOrders`` (down) and ``ConnectorEvents`` (up).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kv_transfer.fault_options import FaultOptions
from kv_transfer.layout import KVLayout, KVRegion
from kv_transfer.params import Hello, KVStreamParams, KVTransferParams
from kv_transfer.protocols import EvictionTier, KVConsumer, KVProducer, KVSource
from kv_transfer.stats import TransferStats
from kv_transfer.stream_gate import StreamGate


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """Read ``source_block_ids`` of the peer into ``block_ids`` of our own cache, pairwise.

    ``checksums`` are those of the source's blocks, where it made them. ``stream_id`` names the stream that has read
    some of them already.
    """

    request_id: str
    params: KVTransferParams
    source_block_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    checksums: tuple[int, ...] | None = None
    stream_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOrder:
    """Read the prompt of ``request_id`` into ``block_ids`` while the peer computes it, block by announced block.

    ``places`` say, for each of ``block_ids``, which block of the prompt it is for (``block_place``). ``gate`` is closed
    when nobody wants the stream any more.
    """

    stream_id: str
    request_id: str
    params: KVStreamParams
    places: tuple[int, ...]
    block_ids: tuple[int, ...]
    gate: StreamGate


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOrder:
    """Copy ``block_ids`` of our own cache into ``slots`` of a tier, pairwise, before they are written again.

    ``block_hashes`` address the content, pairwise. ``dropped_slots`` hold what nobody may find again: they are emptied
    before the copies.
    """

    block_ids: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    block_hashes: tuple[bytes, ...] = ()
    dropped_slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOrders:
    """What the scheduler's half asks of the worker's half in one step.

    ``releases`` are hand-overs that will not be read by this engine at all (request refused, aborted before its
    load began, prompt already here): their leases end on the peer. ``cancelled_loads`` names loads whose result
    nobody wants; each is still reported as ended, and its destination stays held until then. ``expected`` are
    hand-overs of requests that wait here: their leases are kept alive until they are loaded, released, or
    ``passed_on``: then their requests go on elsewhere, and have one more time-to-live to get there. ``streams`` begin
    before ``loads``, which may take them over. ``stores`` are done, in order, before anything else. ``parts`` are the
    orders of each source of a chain, which has no others.
    """

    loads: tuple[LoadOrder, ...] = ()
    cancelled_loads: tuple[str, ...] = ()
    releases: tuple[KVTransferParams, ...] = ()
    expected: tuple[KVTransferParams, ...] = ()
    passed_on: tuple[KVTransferParams, ...] = ()
    streams: tuple[StreamOrder, ...] = ()
    cancelled_streams: tuple[str, ...] = ()
    stores: tuple[StoreOrder, ...] = ()
    parts: tuple[ConnectorOrders, ...] = ()

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to do."""
        loads = (self.loads, self.cancelled_loads, self.streams, self.cancelled_streams, self.stores)
        leases = (self.releases, self.expected, self.passed_on)
        return not (any(loads) or any(leases)) and all(part.is_empty for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadEnded:
    """A load ended: from now on nothing writes its destination.

    ``failed_block_ids`` are destination blocks whose content must not be used; empty on success. ``error`` says
    why, for logs and for the policy ``fail``. ``is_cancelled``: nobody wanted it any more, or the connector closed.
    """

    request_id: str
    failed_block_ids: tuple[int, ...]
    num_bytes: int
    duration_s: float
    error: str | None = None
    is_cancelled: bool = False


class LeaseEnd(StrEnum):
    """Why a lease ended; a lease ends once."""

    DONE = "done"
    EXPIRED = "expired"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEnded:
    """A lease that this engine granted ended: the pinned blocks of that request may be freed."""

    request_id: str
    lease_id: str
    reason: LeaseEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorEvents:
    """What ended since the last call.

    ``stalled`` names loads that ran out of time while something may still write their destination: their requests
    need not wait any longer, their destination must, until the load is reported as ended. ``ended_streams`` names
    cancelled streams whose last read ended: nothing writes their destination any more.
    """

    loads: tuple[LoadEnded, ...] = ()
    leases: tuple[LeaseEnded, ...] = ()
    stalled: tuple[str, ...] = ()
    ended_streams: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """True when nothing ended."""
        return not (self.loads or self.leases or self.stalled or self.ended_streams)


NO_ORDERS = ConnectorOrders()
NO_EVENTS = ConnectorEvents()


class WorkerConnector(Protocol):
    """The worker's half. ``execute`` and ``collect`` are called from the engine's thread and never block."""

    @property
    def is_alive(self) -> bool:
        """False once its threads have ended, by ``close`` or by a fault: every load fails from then on."""

    @property
    def has_hung_read(self) -> bool:
        """True while a read hangs for good: its destination is held, and nothing here is sure to end it."""

    def execute(self, orders: ConnectorOrders) -> None:
        """Start what was ordered."""

    def collect(self) -> ConnectorEvents:
        """Take what ended since the last call, each event once."""

    def stats(self) -> TransferStats:
        """Counters since the start."""

    def close(self) -> None:
        """Stop the threads and deregister the memory. Idempotent."""


class PeerWorkerConnector(WorkerConnector, Protocol):
    """The worker's half of what moves blocks between engines: peers can meet it."""

    def accept(self, hello: Hello) -> Hello:
        """Meet a peer that introduces itself, and answer with ourselves. May be called from any thread.

        Raises:
            HandshakeRefusedError: Protocol version or layout differ.
        """


class Rendezvous(Protocol):
    """How a connector reaches a peer for the first time; ``cluster/`` fills it with Ray, tests with a pipe."""

    def meet(self, engine_id: str, hello: Hello, *, timeout_s: float) -> Hello:
        """Carry our hello to a peer and bring back its own. Called from a connector's thread; blocks.

        Raises:
            PeerUnreachableError: There is no such engine, or it did not answer in time.
            HandshakeRefusedError: The peer refused us.
        """


class PeerDirectory(Protocol):
    """Whom a connector has met. May be used from any thread."""

    @property
    def ids(self) -> frozenset[str]:
        """The engine ids of all that are known now."""

    @property
    def has_room(self) -> bool:
        """Whether another one can be met and nobody forgotten for it."""

    def greet(self, engine_id: str) -> None:
        """Begin to meet an engine before it is needed, if there is room; known ones are left alone."""

    def forget(self, engine_id: str) -> None:
        """An engine is gone for good."""


class FaultSwitch(Protocol):
    """What a live connector is to suffer. May be used from any thread."""

    def change(self, options: FaultOptions) -> None:
        """From now on these faults, and no others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConnector:
    """The scheduler's half: who answers which of its questions. ``tier`` None: what is evicted is lost.

    ``take_orders`` hands over what was queued since its last call.
    """

    source: KVSource
    producer: KVProducer
    consumer: KVConsumer
    take_orders: Callable[[], ConnectorOrders]
    tier: EvictionTier | None = None


@dataclass(slots=True, kw_only=True)
class Connector:
    """Both halves, as a factory returns them; ``faults`` only where they are allowed."""

    scheduler: SchedulerConnector
    worker: PeerWorkerConnector
    peers: PeerDirectory | None = None
    faults: FaultSwitch | None = None


WakeCallback = Callable[[], None]
"""Called from a connector's thread when ``collect`` has something new: an idle engine must wake up."""

ConnectorBuilder = Callable[[KVLayout, KVRegion, WakeCallback], Connector]
"""Makes a connector for a cache of that layout at that place."""
