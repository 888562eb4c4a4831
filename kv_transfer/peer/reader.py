"""The reading side of the hand-over: carries each load from order to end, and releases leases that are not needed.

A load meets its peer, reads its blocks in parts, and tells the source "done". It is good only if the source answers
that the lease was alive until then; otherwise all its blocks are invalid. A part that could not be read, or a block
with a wrong checksum, makes only itself invalid. A load is reported as ended only when nothing can write its
destination any more. So even after it failed, was cancelled or timed out, it waits for its reads in flight: only the
end of the agent stops those (cluster/serve/hung_reads.py lists what was tried). Such a read ends when the peer goes on
or dies, or when the transport's keep-alive finds the peer's host gone. Meanwhile the load is reported as stalled, so
that only its destination blocks wait. While a read hangs nothing more is read from that peer: this bounds how many
blocks are held, and spares later requests the same wait.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

from kv_transfer.connector import LoadEnded, LoadOrder
from kv_transfer.layout import KVRegion
from kv_transfer.memory.block_memory import BlockChecksums
from kv_transfer.peer.counters import TransferCounters
from kv_transfer.peer.heartbeat import Heartbeat
from kv_transfer.peer.load import Load, LoadPhase
from kv_transfer.peer.notifications import Ack, Done, Notification, encode_notification
from kv_transfer.peer.part_reads import PartReads, ReaderLimits, Verifier, split_blocks
from kv_transfer.peer.peers import Peer, PeerTable
from kv_transfer.peer.silence import Silence
from kv_transfer.peer.stream_reader import QUIET_S, StreamReader
from kv_transfer.transport import ReadState, Transport, TransportError

logger = logging.getLogger(f"baton.{__name__}")

_MAX_RETRIES = 1
_MAX_DONES = 3


class Reader:
    """Runs the loads of one engine. Owned by the connector's thread; nothing here blocks but the transport's copy.

    ``heartbeat`` renews the leases of loads and of hand-overs that may become loads. ``reads`` are all reads that may
    write into our region. ``on_stalled`` gets the request id of a load that timed out while a read may still write
    its destination; ``on_ended`` follows when the load ends. With ``memory`` the blocks of hand-overs that carry
    checksums are verified.
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
        on_stream_ended: Callable[[str], None],
        memory: BlockChecksums | None = None,
        on_verified: Callable[[], None] = lambda: None,
    ) -> None:
        self.heartbeat = Heartbeat(peers=peers, clock=clock, period_s=limits.renewal_period_s, send=self._send)
        verifier = Verifier(memory, name=name, on_done=on_verified)
        self.reads = PartReads(
            transport=transport, peers=peers, limits=limits, counters=counters, verifier=verifier, clock=clock
        )
        self.streams = StreamReader(
            region=region,
            reads=self.reads,
            peers=peers,
            limits=limits,
            clock=clock,
            counters=counters,
            send=self._send,
            lose_peer=self._lose_peer,
            on_ended=on_stream_ended,
        )
        self._name = name
        self._region = region
        self._transport = transport
        self._peers = peers
        self._limits = limits
        self._clock = clock
        self._silence = Silence(clock=clock, limits=limits)
        self._counters = counters
        self._on_ended = on_ended
        self._on_stalled = on_stalled
        self._serial = itertools.count()
        self._loads: dict[str, Load] = {}
        self._is_closing = False

    @property
    def needs_polling(self) -> bool:
        """True while a read may end, or an answer may arrive, at any moment."""
        return self.streams.needs_polling or any(
            load.phase is not LoadPhase.MEETING or load.reads for load in self._loads.values()
        )

    def begin(self, order: LoadOrder) -> None:
        """Start a load."""
        load = self._make_load(order)
        if not any(other.awaits_source and other.source_id == load.source_id for other in self._loads.values()):
            self._silence.end(load.source_id)
        self._loads[load.reader_id] = load
        if self._is_closing:
            self._fail(load, "the connector is closed")
            self._end(load)
        else:
            self.heartbeat.expect(order.params)
            self._meet(load)

    def cancel(self, request_id: str) -> None:
        """Cancel the loads of a request; unknown ids are ignored."""
        for load in [load for load in self._loads.values() if load.order.request_id == request_id]:
            load.is_cancelled = True
            self._fail(load, "cancelled")

    def heard(self, peer: Peer) -> None:
        """Note that a message, of any kind, came from a peer."""
        self._silence.end(peer.identity.engine_id)

    def on_ack(self, ack: Ack, *, sender: str) -> bool:
        """Handle a source's answer to "done"; False when no load waits for it."""
        load = self._loads.get(ack.reader)
        if load is None or load.phase is not LoadPhase.CONFIRMING or load.is_confirmed:
            return False
        if load.order.params.lease_id != ack.lease_id:
            return False
        if load.peer is None or load.peer.name != sender:
            return False
        load.is_confirmed = True
        if not ack.is_alive:
            load.error = "the lease ended before the read was confirmed"
        self._end_if_verified(load)
        return True

    def advance(self) -> bool:
        """Do what can be done now; True when anything changed."""
        did_anything = self.heartbeat.advance()
        self._silence.look(load.source_id for load in self._loads.values() if load.awaits_source)
        for load in tuple(self._loads.values()):
            did_anything |= self._advance_load(load)
        # Loads go first: a request waits for each load, but no request waits for a stream yet.
        may_stream = not any(load.waiting for load in self._loads.values())
        did_anything |= self.streams.advance(may_post=may_stream)
        self.reads.look()
        return did_anything

    def give_up(self) -> None:
        """Fail all loads, present and future. A load with reads in flight ends when ``advance`` has seen them end."""
        self._is_closing = True
        self.streams.give_up()
        for load in self._loads.values():
            load.is_cancelled = True
            self._fail(load, "the connector was closed")

    def end_all(self) -> None:
        """End all remaining loads: the transport is closed, so their reads have ended."""
        self.streams.end_all()
        for load in tuple(self._loads.values()):
            self._end(load)

    def close(self) -> None:
        """Stop verifying blocks. This must be the last call."""
        self.reads.close()

    def _make_load(self, order: LoadOrder) -> Load:
        """A load of all blocks, or of those that its stream has not read yet."""
        takeover = self.streams.take(order, peer=self._peers.find(order.params.source))
        now_s = self._clock()
        if takeover is not None:
            parts = takeover.unread
        else:
            parts = tuple(
                split_blocks(
                    order.source_block_ids,
                    order.block_ids,
                    order.checksums,
                    block_bytes=self._region.block_bytes,
                    limits=self._limits,
                )
            )
        load = Load(
            order=order,
            reader_id=f"{self._name}/{next(self._serial)}",
            started_s=now_s,
            deadline_s=now_s + self._limits.load_timeout_s,
            unread={part.number: part for part in parts},
        )
        if takeover is not None:
            load.reads.extend(takeover.reads)
            load.quiet_at_s = takeover.quiet_at_s
            load.num_streamed_blocks = takeover.num_held_blocks
            load.num_bytes = takeover.num_held_blocks * self._region.block_bytes
        return load

    def _advance_load(self, load: Load) -> bool:
        if load.is_open and self._clock() >= load.deadline_s:
            self._fail(load, f"not loaded within {self._limits.load_timeout_s:g} s")
            return True
        if load.is_open and self._silence.is_too_long(load.source_id, load.peer.bytes_in_flight if load.peer else 0):
            load.deadline_s = self._clock()
            self._fail(load, f"{load.source_id} was silent for {self._limits.answer_timeout_s:g} s")
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
        """Continue at once if the peer is known, otherwise after a handshake."""
        load.phase = LoadPhase.MEETING
        peer = self._peers.find(load.order.params.source)
        if peer is None:
            load.handshake = self._peers.meet(load.order.params.source)
        elif load.is_salvage or not (load.unread or load.reads):
            load.peer = peer
            load.phase = LoadPhase.CONFIRMING
        else:
            load.peer = peer
            self._begin_reading(load, peer)

    def _begin_reading(self, load: Load, peer: Peer) -> None:
        misfit = load.misfit(num_source_blocks=peer.hello.num_blocks, num_blocks=self._region.num_blocks)
        if misfit is not None:
            self._fail(load, misfit)
        else:
            load.phase = LoadPhase.READING
            load.waiting.extend(load.parts_to_post())

    def _advance_meeting(self, load: Load) -> bool:
        assert load.handshake is not None
        if self._peers.find(load.order.params.source) is not None:
            self._silence.end(load.source_id)
            self._meet(load)
            return True
        if not load.handshake.is_finished:
            return False
        self._fail(load, str(load.handshake.error or "the peer was connected and lost again"))
        return True

    def _advance_reading(self, load: Load) -> bool:
        assert load.peer is not None
        if self._poll_reads(load):
            self._lose_peer(load.peer, "a read failed")
            return True
        num_before = len(load.waiting)
        if load.waiting and self._may_post(load, load.peer):
            try:
                load.reads.append(self.reads.post(load.peer, load.waiting.popleft()))
            except TransportError as error:
                self._lose_peer(load.peer, error.reason)
                return True
        if load.waiting or load.reads:
            return len(load.waiting) < num_before
        load.phase = LoadPhase.CONFIRMING
        self._advance_confirming(load)
        return True

    def _may_post(self, load: Load, peer: Peer) -> bool:
        """True when a part may be read now: limits allow it, and no other read may still write the destination."""
        if load.has_stale_reads() or self._clock() < load.quiet_at_s:
            return False
        return self.reads.may_post(peer, load.waiting[0])

    def _advance_confirming(self, load: Load) -> bool:
        assert load.peer is not None
        if load.is_confirmed:
            return self._end_if_verified(load)
        now_s = self._clock()
        if now_s < load.next_done_s:
            return False
        if load.num_dones == _MAX_DONES:
            self._lose_peer(load.peer, "the source did not confirm the end of the read")
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

    def _end_if_verified(self, load: Load) -> bool:
        """End a load that its source confirmed, once its checksums are verified."""
        if load.error is None and not load.collect_verified(self.reads):
            return False
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
            self._lose_peer(load.peer, "a read hangs; if all reads do, check that ports between the hosts are open")

    def _may_retry(self, load: Load) -> bool:
        """True when a load may be retried after its connection broke: the connection may only have been idle."""
        return load.num_retries < _MAX_RETRIES and self._has_lost_its_connection(load)

    def _may_salvage(self, load: Load) -> bool:
        """True when, after a second broken connection, the parts that have arrived may still be confirmed."""
        return load.num_bytes > 0 and not load.is_salvage and self._has_lost_its_connection(load)

    def _has_lost_its_connection(self, load: Load) -> bool:
        is_lost = load.peer is not None and self._peers.find(load.order.params.source) is not load.peer
        return is_lost and not load.is_cancelled and self._clock() < load.deadline_s

    def _retry(self, load: Load) -> None:
        """Read the remaining parts over a new connection. Parts that were read only need a new confirmation: a repeated
        "done" from the same reader gets the same answer, even if the first one ended the lease."""
        logger.info("load retried: request_id=%s error=%s", load.order.request_id, load.error)
        load.begin_anew()
        self._counters.num_retried_loads += 1
        self.heartbeat.expect(load.order.params)
        self._meet(load)

    def _poll_reads(self, load: Load) -> bool:
        """Collect the reads that ended; True when the read of a wanted part failed."""
        has_failed = False
        for entry in tuple(load.reads):
            state = self.reads.poll(entry)
            if state is ReadState.ACTIVE:
                continue
            load.reads.remove(entry)
            is_wanted = entry.part.number in load.unread
            if state is ReadState.FAILED:
                has_failed |= is_wanted
                load.quiet_at_s = self._clock() + QUIET_S
            elif is_wanted:
                self._silence.end(load.source_id)
                load.num_bytes += entry.part.num_bytes
                load.verify(load.unread.pop(entry.part.number), self.reads)
        return has_failed

    def _fail(self, load: Load, error: str) -> None:
        """Fail a load; it ends when none of its reads is in flight."""
        load.error = load.error or error
        load.waiting.clear()
        load.phase = LoadPhase.STOPPING
        self.heartbeat.forget(load.order.params)

    def _lose_peer(self, peer: Peer, reason: str) -> None:
        """Forget a peer whose connection broke, and fail the loads over that connection."""
        logger.warning("peer lost: engine_id=%s reason=%s", peer.identity.engine_id, reason)
        self._peers.drop(peer)
        self.streams.stop_peer(peer)
        for load in self._loads.values():
            if load.peer is peer and load.is_open:
                self._fail(load, f"connection to {peer.identity.engine_id} broke: {reason}")

    def _end(self, load: Load) -> None:
        del self._loads[load.reader_id]
        self.heartbeat.forget(load.order.params)
        ended = load.ended(now_s=self._clock())
        self._counters.add_load(ended)
        if load.error is None and not load.is_cancelled:
            self._counters.num_streamed_blocks += load.num_streamed_blocks
            self._counters.num_streamed_bytes += load.num_streamed_blocks * self._region.block_bytes
        if ended.error is not None:
            logger.info("load failed: request_id=%s error=%s", load.order.request_id, ended.error)
        self._on_ended(ended)

    def _send(self, peer: Peer, notification: Notification) -> None:
        try:
            self._transport.send(peer.name, encode_notification(notification))
        except TransportError as error:
            self._lose_peer(peer, error.reason)
