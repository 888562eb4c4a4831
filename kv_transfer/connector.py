"""A connector links an engine to the code that moves its KV blocks. It has two halves.

The scheduler's half decides. It runs in the engine's thread, never blocks, and implements the Protocols of
``kv_transfer.protocols``. The worker's half moves bytes. It may have a thread of its own, and reports what ended. In
each step ``ConnectorOrders`` go to the worker's half, and ``ConnectorEvents`` come back.
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
    """Read the peer's ``source_block_ids`` into ``block_ids`` of our own cache, pairwise.

    ``checksums`` are those of the source's blocks, if the source computed any. ``stream_id`` names the stream that has
    already read some of these blocks.
    """

    request_id: str
    params: KVTransferParams
    source_block_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    checksums: tuple[int, ...] | None = None
    stream_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOrder:
    """Read the KV of a prompt into ``block_ids`` while the peer computes it, each block once it is announced.

    ``places`` says, for each of ``block_ids``, which block of the prompt it receives (``block_place``). The scheduler
    closes ``gate`` to cancel the stream.
    """

    stream_id: str
    request_id: str
    params: KVStreamParams
    places: tuple[int, ...]
    block_ids: tuple[int, ...]
    gate: StreamGate


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOrder:
    """Copy ``block_ids`` of our own cache into ``slots`` of a tier, pairwise, before the blocks are reused.

    ``block_hashes`` are the content addresses, pairwise. ``dropped_slots`` hold content that must not be found again:
    they are emptied before the copies.
    """

    block_ids: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    block_hashes: tuple[bytes, ...] = ()
    dropped_slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOrders:
    """What the scheduler's half asks of the worker's half in one step.

    releases: hand-overs that this engine will not read (the request was refused, or aborted before its load began, or
        the prompt's KV is already here). The peer ends their leases.
    cancelled_loads: loads whose result nobody wants. Each is still reported as ended, and its destination blocks stay
        held until then.
    expected: hand-overs of requests that wait here. Their leases are renewed until the KV is loaded, released or
        passed on.
    passed_on: hand-overs of requests that go on at another engine. Their leases are renewed one last time.
    streams: begin before ``loads``, because a load may take over a stream.
    stores: are carried out, in order, before anything else.
    parts: the orders for each source of a chain. A chain has no other orders.
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
    """A load ended: from now on nothing writes its destination blocks.

    ``failed_block_ids`` are destination blocks whose content must not be used; empty on success. ``error`` says
    why, for logs and for the policy ``fail``. ``is_cancelled``: the load was cancelled, or the connector closed.
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

    ``stalled`` names loads that timed out while a read may still write their destination. Their requests need not
    wait any longer, but the destination blocks stay held until the load is reported as ended. ``ended_streams`` names
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
        """True while a read hangs for good: its destination is held, and only this process's end is sure to end it."""

    def execute(self, orders: ConnectorOrders) -> None:
        """Start what was ordered."""

    def collect(self) -> ConnectorEvents:
        """Take what ended since the last call, each event once."""

    def stats(self) -> TransferStats:
        """Counters since the start."""

    def close(self) -> None:
        """Stop the threads and deregister the memory. Idempotent."""


class PeerWorkerConnector(WorkerConnector, Protocol):
    """The worker's half of a connector that moves blocks between engines: peers can introduce themselves to it."""

    def accept(self, hello: Hello) -> Hello:
        """Handle a peer's introduction, and answer with our own hello. May be called from any thread.

        Raises:
            HandshakeRefusedError: Protocol version or layout differ.
        """


class Rendezvous(Protocol):
    """How a connector reaches a peer for the first time: over Ray in a cluster, over a pipe in tests."""

    def meet(self, engine_id: str, hello: Hello, *, timeout_s: float) -> Hello:
        """Carry our hello to a peer and bring back its own. Called from a connector's thread; blocks.

        Raises:
            PeerUnreachableError: There is no such engine, or it did not answer in time.
            HandshakeRefusedError: The peer refused us.
        """


class PeerDirectory(Protocol):
    """The peers that a connector has met. May be used from any thread."""

    @property
    def ids(self) -> frozenset[str]:
        """The engine ids of all peers that are known now."""

    @property
    def has_room(self) -> bool:
        """True when another peer can be met without forgetting a known one."""

    def greet(self, engine_id: str) -> None:
        """Begin the handshake with an engine before it is needed, if there is room. Known peers are left alone."""

    def forget(self, engine_id: str) -> None:
        """Forget an engine that is gone for good."""


class FaultSwitch(Protocol):
    """Changes the faults that are injected into a live connector. May be used from any thread."""

    def change(self, options: FaultOptions) -> None:
        """Inject these faults from now on, and no others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConnector:
    """The scheduler's half: the object that implements each Protocol. ``tier`` None: evicted blocks are lost.

    ``take_orders`` returns the orders that were queued since its last call.
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
"""Wakes an idle engine. A connector's thread calls it when ``collect`` has something new."""

ConnectorBuilder = Callable[[KVLayout, KVRegion, WakeCallback], Connector]
"""Makes a connector for a KV cache with the given layout and memory region."""
