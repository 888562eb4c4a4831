"""The two Protocols between an engine and whatever moves its KV blocks.

The scheduler's half decides and keeps books: it runs in the engine's thread, and never blocks. The worker's half
moves bytes: it may have a thread of its own, and reports what ended. What passes between them in a step is
``ConnectorOrders`` (down) and ``ConnectorEvents`` (up).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kv_transfer.cache_groups import GroupBlocks
from kv_transfer.fault_options import FaultOptions
from kv_transfer.layout import KVLayout, KVRegion
from kv_transfer.params import Hello, KVStreamParams, KVTransferParams
from kv_transfer.stream_gate import StreamGate


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteMatch:
    """How many tokens beyond the local prefix a connector can supply. Every load is asynchronous."""

    num_tokens: int


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
    """Copy ``block_ids`` of our own cache into ``slots`` of a tier, pairwise, before they are written again."""

    block_ids: tuple[int, ...]
    slots: tuple[int, ...]


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
class TransferStats:
    """Counters since the start of the connector.

    ``num_transfers`` are the loads that ended; cancelled ones count neither as failed nor as good. A failed load may
    have good blocks; ``num_corrupt_blocks`` are the failed ones whose checksum was wrong. ``num_blocks`` is what was
    moved, of whatever load and of whatever use: ``num_bytes`` is always that many blocks' bytes.
    ``num_streamed_blocks`` are those of good loads that were here before the load was ordered: their transfer hid
    behind the prefill. ``num_host_*`` are those of the host tier: ``num_host_loaded_*`` are part of ``num_blocks`` and
    ``num_bytes``, and ``num_host_refused_blocks`` found no room because every slot was being read.
    """

    num_transfers: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    transfer_s: float = 0.0
    num_failed_loads: int = 0
    num_failed_blocks: int = 0
    num_corrupt_blocks: int = 0
    num_cancelled_loads: int = 0
    num_retried_loads: int = 0
    num_stalled_loads: int = 0
    num_streams: int = 0
    num_streamed_blocks: int = 0
    num_streamed_bytes: int = 0
    num_announced_blocks: int = 0
    num_leases_granted: int = 0
    num_leases_done: int = 0
    num_leases_expired: int = 0
    num_leases_aborted: int = 0
    num_handshakes: int = 0
    num_handshakes_failed: int = 0
    num_unknown_notifications: int = 0
    num_injected_faults: int = 0
    num_host_hit_blocks: int = 0
    num_host_stored_blocks: int = 0
    num_host_stored_bytes: int = 0
    num_host_loaded_blocks: int = 0
    num_host_loaded_bytes: int = 0
    num_host_evicted_blocks: int = 0
    num_host_evicted_bytes: int = 0
    num_host_refused_blocks: int = 0


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


class SchedulerConnector(Protocol):
    """The scheduler's half. Called from the engine's thread only; no call blocks.

    ``can_stream``: prompts can be handed over, and read, while they are computed.
    """

    @property
    def can_stream(self) -> bool:
        """True when ``announce`` and ``begin_stream`` do something."""

    def expect(self, params: KVTransferParams) -> None:
        """A request with this hand-over waits here: keep its lease until ``begin_load``, ``release`` or ``pass_on``."""

    def pass_on(self, params: KVTransferParams) -> None:
        """A request that waited here goes on elsewhere: its lease is kept alive from there, or ends by itself."""

    def match(
        self,
        *,
        request_id: str,
        params: KVTransferParams | None,
        num_prompt_tokens: int,
        num_local_tokens: int,
        block_hashes: Sequence[Sequence[bytes]] = (),
    ) -> RemoteMatch | None:
        """Say what can be supplied beyond the local prefix; None means "not known yet, ask again".

        ``num_prompt_tokens`` are the tokens known so far: with those that were generated elsewhere before a move.
        ``block_hashes`` address, by KV cache group, the full blocks that the request may take from a cache, from its
        first block on. Of a group with a window the blocks suffice that the token behind the match sees.
        """

    def begin_load(
        self,
        *,
        request_id: str,
        params: KVTransferParams | None,
        first_block: int,
        block_ids: GroupBlocks,
        stream_id: str | None = None,
    ) -> None:
        """Queue the load of blocks from the ``first_block``-th one of the request on, equally many of each group.

        It takes up what the last ``match`` offered to this request; nothing was matched since. ``stream_id`` names a
        stream with the same destination: the load takes it over, and reads only what is missing. Then ``match`` was
        asked without ``block_hashes``, so that all of it comes from the peer.
        """

    def begin_stream(
        self, *, stream_id: str, request_id: str, params: KVStreamParams, first_block: int, block_ids: GroupBlocks
    ) -> bool:
        """Begin to read the blocks that a peer announces, from the ``first_block``-th one of the prompt on.

        Nothing of it counts before a load took it over. False: this cannot be streamed; nothing was begun.
        """

    def cancel_stream(self, stream_id: str) -> bool:
        """Stop a stream that no load took over.

        Returns:
            True when nothing writes its destination from now on; else ``ended_streams`` says when.
        """

    def announce(self, *, request_id: str, first_block: int, block_ids: GroupBlocks) -> None:
        """Full blocks of a prompt that will be handed over are computed, from the ``first_block``-th on.

        Those are absent that the lease will not cover, because they will have left the window of their group.
        They stay as they are, and held, until ``grant_lease`` or ``withdraw`` of this request.
        """

    def withdraw(self, request_id: str) -> None:
        """The blocks announced for a request are given up: whoever read them must not use them."""

    def cancel_load(self, request_id: str) -> None:
        """The request ended while loading; its ``LoadEnded`` still comes. Unknown ids are ignored."""

    def release(self, params: KVTransferParams) -> None:
        """This engine will not read these blocks (any more): let the peer's lease end."""

    def keep_evicted(self, block_ids: Sequence[int], block_hashes: Sequence[bytes]) -> Sequence[bytes]:
        """The prefix cache gives these blocks up: keep their content, if this connector is one that does.

        It is copied before the next step computes or loads anything. Returns what cannot be found here any more: the
        content that is not kept, and older content that made room.
        """

    def forget_evicted(self) -> int:
        """The prefix cache was reset: offer nothing that was kept until now. Returns how many blocks that were."""

    def grant_lease(self, *, request_id: str, block_ids: GroupBlocks, num_tokens: int) -> KVTransferParams:
        """Pin a finished request's blocks for a reader; ``LeaseEnded`` says when to free them.

        Each group's ``block_ids`` are the last of those that hold ``num_tokens`` tokens.
        """

    def abort_lease(self, request_id: str) -> None:
        """End the lease of a request now; ``LeaseEnded`` follows. Unknown ids are ignored."""

    def take_orders(self) -> ConnectorOrders:
        """Hand over what was queued since the last call."""


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

    def accept(self, hello: Hello) -> Hello:
        """Meet a peer that introduces itself, and answer with ourselves. May be called from any thread.

        Raises:
            HandshakeRefusedError: Protocol version or layout differ.
        """

    def close(self) -> None:
        """Stop the threads and deregister the memory. Idempotent."""


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

    def greet(self, engine_id: str) -> None:
        """Begin to meet an engine before anything is to be read from it; known ones are left alone."""

    def forget(self, engine_id: str) -> None:
        """An engine is gone for good."""


class FaultSwitch(Protocol):
    """What a live connector is to suffer. May be used from any thread."""

    def change(self, options: FaultOptions) -> None:
        """From now on these faults, and no others."""


@dataclass(slots=True, kw_only=True)
class Connector:
    """Both halves, as a factory returns them; ``faults`` only where they are allowed."""

    scheduler: SchedulerConnector
    worker: WorkerConnector
    peers: PeerDirectory | None = None
    faults: FaultSwitch | None = None


WakeCallback = Callable[[], None]
"""Called from a connector's thread when ``collect`` has something new: an idle engine must wake up."""

ConnectorBuilder = Callable[[KVLayout, KVRegion, WakeCallback], Connector]
"""Makes a connector for a cache of that layout at that place."""
