"""The reading side of the hand-over: takes loads from order to end, and lets go of what will not be read.

A load meets its peer, reads its blocks in parts, tells the source "done", and is good only when the source answers
that the lease was alive until then. Anything else makes all its blocks invalid; but a part that could not be read, or
a block whose checksum is wrong, costs no more than itself. A load is reported as ended only when
nothing can write its destination any more: reads in flight are waited for even after the load failed, was cancelled
or ran out of time, because with NIXL over TCP neither releasing a transfer, nor removing its peer, nor deregistering
the memory stopped the bytes on their way (measured: all of them arrived later; destroying the agent stops them, and can
crash the peer). Such a read ends when the peer goes on, dies, or the transport's keep-alive finds its host gone. The
load is reported as stalled meanwhile, so that only its destination waits; and as long as the read hangs nothing more is
read from that peer, which bounds how much is held and spares later requests the same wait.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.block_memory import BlockMemory
from kv_transfer.connector import LoadEnded, LoadOrder
from kv_transfer.counters import TransferCounters
from kv_transfer.heartbeat import Heartbeat
from kv_transfer.layout import KVRegion
from kv_transfer.load import Load, LoadPhase, Part, split_order
from kv_transfer.notifications import Ack, Done, Notification, encode_notification
from kv_transfer.peers import Peer, PeerTable
from kv_transfer.transport import ReadState, Transport, TransportError

logger = logging.getLogger(f"baton.{__name__}")

_QUIET_S = 0.1
_MAX_RETRIES = 1
_MAX_DONES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderLimits:
    """What bounds the reads. Defaults: parts small enough that messages are answered between two of them."""

    load_timeout_s: float
    renewal_period_s: float
    done_retry_s: float = 1.0
    part_bytes: int = 32 << 20
    max_bytes_in_flight: int = 1 << 30
    max_bytes_in_flight_per_peer: int = 256 << 20


class Reader:
    """Runs the loads of one engine. Owned by the connector's thread; nothing here blocks but the transport's copy.

    ``heartbeat`` holds the leases of loads and of those that may become loads. ``on_stalled`` gets the request id of
    a load that ran out of time while a read of it may still write; its end follows when it is known. With ``memory``
    the blocks of hand-overs that carry checksums are compared with them.
    """

    def __init__(
        self,
        *,
        name: str,
        region: KVRegion,
        transport: Transport,
        peers: PeerTable,
        limits: ReaderLimits,
        clock: Callable[[], float],
        counters: TransferCounters,
        on_ended: Callable[[LoadEnded], None],
        on_stalled: Callable[[str], None],
        memory: BlockMemory | None = None,
    ) -> None:
        self.heartbeat = Heartbeat(peers=peers, clock=clock, period_s=limits.renewal_period_s, send=self._send)
        self._name = name
        self._region = region
        self._transport = transport
        self._peers = peers
        self._limits = limits
        self._clock = clock
        self._counters = counters
        self._on_ended = on_ended
        self._on_stalled = on_stalled
        self._memory = memory
        self._serial = itertools.count()
        self._loads: dict[str, Load] = {}
        self._num_reads = 0
        self._bytes_in_flight = 0
        self._is_closing = False

    @property
    def has_reads(self) -> bool:
        """True while anything may be written into our region."""
        return self._num_reads > 0

    @property
    def needs_polling(self) -> bool:
        """True while the end of a read or an answer may arrive at any moment."""
        return any(load.phase is not LoadPhase.MEETING for load in self._loads.values())

    def begin(self, order: LoadOrder) -> None:
        """Start a load."""
        now_s = self._clock()
        parts = split_order(order, block_bytes=self._region.block_bytes, part_bytes=self._limits.part_bytes)
        load = Load(
            order=order,
            reader_id=f"{self._name}/{next(self._serial)}",
            started_s=now_s,
            deadline_s=now_s + self._limits.load_timeout_s,
            unread={part.number: part for part in parts},
        )
        self._loads[load.reader_id] = load
        if self._is_closing:
            self._fail(load, "the connector is closed")
            self._end(load)
        else:
            self.heartbeat.expect(order.params)
            self._meet(load)

    def cancel(self, request_id: str) -> None:
        """Nobody wants this load any more; unknown ids are ignored."""
        for load in [load for load in self._loads.values() if load.order.request_id == request_id]:
            load.is_cancelled = True
            self._fail(load, "cancelled")

    def on_ack(self, ack: Ack, *, sender: str) -> bool:
        """Take a source's answer to "done"; False when nobody waits for it."""
        load = self._loads.get(ack.reader)
        if load is None or load.phase is not LoadPhase.CONFIRMING or load.order.params.lease_id != ack.lease_id:
            return False
        if load.peer is None or load.peer.name != sender:
            return False
        if not ack.is_alive:
            load.error = "the lease ended before the read was confirmed"
        self._end(load)
        return True

    def advance(self) -> bool:
        """Do what can be done now; True when anything moved."""
        did_anything = self.heartbeat.advance()
        for load in tuple(self._loads.values()):
            did_anything |= self._advance_load(load)
        return did_anything

    def give_up(self) -> None:
        """Fail every load, now and from now on; those with reads in flight end when ``advance`` saw these end."""
        self._is_closing = True
        for load in self._loads.values():
            load.is_cancelled = True
            self._fail(load, "the connector was closed")

    def end_all(self) -> None:
        """End every load that is left: the transport is closed, which ended its reads."""
        for load in tuple(self._loads.values()):
            self._end(load)

    def _advance_load(self, load: Load) -> bool:
        if load.phase is not LoadPhase.STOPPING and self._clock() >= load.deadline_s:
            self._fail(load, f"not loaded within {self._limits.load_timeout_s:g} s")
            return True
        match load.phase:
            case LoadPhase.MEETING:
                return self._advance_meeting(load)
            case LoadPhase.READING:
                return self._advance_reading(load)
            case LoadPhase.CONFIRMING:
                return self._advance_confirming(load)
            case LoadPhase.STOPPING:
                return self._advance_stopping(load)

    def _meet(self, load: Load) -> None:
        """Go on with the peer if it is known, else when it was met."""
        load.phase = LoadPhase.MEETING
        peer = self._peers.find(load.order.params.source)
        if peer is None:
            load.handshake = self._peers.meet(load.order.params.source)
        elif load.is_salvage or not load.unread:
            load.peer = peer
            load.phase = LoadPhase.CONFIRMING
        else:
            load.peer = peer
            self._begin_reading(load, peer)

    def _begin_reading(self, load: Load, peer: Peer) -> None:
        order = load.order
        if not _are_blocks_of(order.source_block_ids, peer.hello.num_blocks):
            self._fail(load, f"a source block is not among the {peer.hello.num_blocks} blocks of the peer")
        elif not _are_blocks_of(order.block_ids, self._region.num_blocks):
            self._fail(load, f"a destination block is not among our {self._region.num_blocks} blocks")
        else:
            load.phase = LoadPhase.READING
            load.waiting.extend(load.unread.values())

    def _advance_meeting(self, load: Load) -> bool:
        assert load.handshake is not None
        if self._peers.find(load.order.params.source) is not None:
            self._meet(load)
            return True
        if not load.handshake.is_finished:
            return False
        self._fail(load, str(load.handshake.error or "the peer was met and lost again"))
        return True

    def _advance_reading(self, load: Load) -> bool:
        assert load.peer is not None
        if self._poll_reads(load):
            self._lose_peer(load.peer, "a read failed")
            return True
        num_before = len(load.waiting)
        if load.waiting and self._may_post(load.peer, load.waiting[0].num_bytes):
            try:
                self._post_part(load, load.peer)
            except TransportError as error:
                self._lose_peer(load.peer, error.reason)
                return True
        if load.waiting or load.reads:
            return len(load.waiting) < num_before
        load.phase = LoadPhase.CONFIRMING
        self._advance_confirming(load)
        return True

    def _post_part(self, load: Load, peer: Peer) -> None:
        part = load.waiting.popleft()
        load.reads.append((self._transport.start_read(peer.name, part.source_block_ids, part.block_ids), part))
        peer.num_reads += 1
        peer.bytes_in_flight += part.num_bytes
        self._num_reads += 1
        self._bytes_in_flight += part.num_bytes

    def _advance_confirming(self, load: Load) -> bool:
        assert load.peer is not None
        now_s = self._clock()
        if now_s < load.next_done_s:
            return False
        if load.num_dones == _MAX_DONES:
            self._lose_peer(load.peer, "no answer to done")
            return True
        load.num_dones += 1
        load.next_done_s = now_s + self._limits.done_retry_s
        self._send(load.peer, Done(lease_id=load.order.params.lease_id, reader=load.reader_id))
        return True

    def _advance_stopping(self, load: Load) -> bool:
        num_before = len(load.reads)
        self._poll_reads(load)
        if load.reads:
            if self._clock() >= load.deadline_s and not load.has_stalled:
                self._stall(load)
            return len(load.reads) < num_before
        if self._clock() < load.quiet_at_s:
            return False
        if self._may_retry(load):
            self._retry(load)
        elif self._may_salvage(load):
            load.damage = load.error
            load.is_salvage = True
            self._retry(load)
        else:
            self.heartbeat.release(load.order.params)
            self._end(load)
        return True

    def _stall(self, load: Load) -> None:
        load.has_stalled = True
        logger.warning(
            "a read hangs, its destination stays held: request_id=%s engine_id=%s num_reads=%d",
            load.order.request_id,
            load.order.params.source.engine_id,
            len(load.reads),
        )
        if not load.is_cancelled:
            self._counters.num_stalled_loads += 1
            self._on_stalled(load.order.request_id)
        if load.peer is not None:
            self._lose_peer(load.peer, "a read hangs")

    def _may_retry(self, load: Load) -> bool:
        """After a broken connection a load is tried once more over a new one: the old may only have been idle."""
        return load.num_retries < _MAX_RETRIES and self._has_lost_its_connection(load)

    def _may_salvage(self, load: Load) -> bool:
        """After the second one the parts that are here need only be confirmed."""
        return load.num_bytes > 0 and not load.is_salvage and self._has_lost_its_connection(load)

    def _has_lost_its_connection(self, load: Load) -> bool:
        is_lost = load.peer is not None and self._peers.find(load.order.params.source) is not load.peer
        return is_lost and not load.is_cancelled and self._clock() < load.deadline_s

    def _retry(self, load: Load) -> None:
        """Begin again with what is not read yet. What was read is only confirmed anew: "done" may have ended the lease
        already, and the source answers the same reader the same."""
        logger.info("load retried: request_id=%s error=%s", load.order.request_id, load.error)
        load.num_retries += 1
        load.error = None
        load.peer = None
        load.num_dones = 0
        load.next_done_s = 0.0
        self._counters.num_retried_loads += 1
        self.heartbeat.expect(load.order.params)
        self._meet(load)

    def _poll_reads(self, load: Load) -> bool:
        """Collect the reads that ended; True when one of them failed."""
        has_failed = False
        for entry in tuple(load.reads):
            read, part = entry
            state = read.poll()
            if state is ReadState.ACTIVE:
                continue
            assert load.peer is not None
            read.close()
            load.reads.remove(entry)
            load.peer.num_reads -= 1
            load.peer.bytes_in_flight -= part.num_bytes
            self._num_reads -= 1
            self._bytes_in_flight -= part.num_bytes
            if state is ReadState.DONE:
                load.num_bytes += part.num_bytes
                self._counters.num_bytes += part.num_bytes
                self._counters.num_blocks += len(part.block_ids)
                self._verify(load, load.unread.pop(part.number))
            else:
                has_failed = True
                load.quiet_at_s = self._clock() + _QUIET_S
            if load.peer.num_reads == 0:
                self._peers.sweep()
        return has_failed

    def _verify(self, load: Load, part: Part) -> None:
        """Compare what arrived with what the source had when it granted the lease."""
        if part.checksums is None or self._memory is None:
            return
        found = self._memory.checksums(part.block_ids)
        corrupt = [
            block_id
            for block_id, ours, theirs in zip(part.block_ids, found, part.checksums, strict=True)
            if ours != theirs
        ]
        if corrupt:
            load.corrupt_block_ids.update(corrupt)
            load.damage = "the checksums of some blocks are wrong"
            self._counters.num_corrupt_blocks += len(corrupt)

    def _may_post(self, peer: Peer, num_bytes: int) -> bool:
        limits = self._limits
        if peer.bytes_in_flight and peer.bytes_in_flight + num_bytes > limits.max_bytes_in_flight_per_peer:
            return False
        return not self._bytes_in_flight or self._bytes_in_flight + num_bytes <= limits.max_bytes_in_flight

    def _fail(self, load: Load, error: str) -> None:
        """Give a load up; it ends when no read of it is in flight."""
        load.error = load.error or error
        load.waiting.clear()
        load.phase = LoadPhase.STOPPING
        self.heartbeat.forget(load.order.params)

    def _lose_peer(self, peer: Peer, reason: str) -> None:
        """The connection to a peer broke: forget it, and give up what was being loaded over it."""
        logger.warning("peer lost: engine_id=%s reason=%s", peer.identity.engine_id, reason)
        self._peers.drop(peer)
        for load in self._loads.values():
            if load.peer is peer and load.phase in (LoadPhase.READING, LoadPhase.CONFIRMING):
                self._fail(load, f"connection to {peer.identity.engine_id} broke: {reason}")

    def _end(self, load: Load) -> None:
        del self._loads[load.reader_id]
        self.heartbeat.forget(load.order.params)
        ended = load.ended(now_s=self._clock())
        self._counters.add_load(ended, is_cancelled=load.is_cancelled)
        if ended.error is not None:
            logger.info("load failed: request_id=%s error=%s", load.order.request_id, ended.error)
        self._on_ended(ended)

    def _send(self, peer: Peer, notification: Notification) -> None:
        try:
            self._transport.send(peer.name, encode_notification(notification))
        except TransportError as error:
            self._lose_peer(peer, error.reason)


def _are_blocks_of(block_ids: tuple[int, ...], num_blocks: int) -> bool:
    return all(0 <= block_id < num_blocks for block_id in block_ids)
