"""The reading side of the hand-over: takes loads from order to end, and lets go of what will not be read.

A load meets its peer, reads its blocks in parts, tells the source "done", and is good only when the source answers
that the lease was alive until then. Anything else makes all its blocks invalid. A load is reported as ended only when
nothing can write its destination any more: reads in flight are waited for even after the load failed, was cancelled
or ran out of time, because neither releasing a read nor disconnecting its peer stops the bytes that are on their way
(measured with NIXL over TCP: all of them arrived later). Such a read ends when the peer goes on, dies, or its host is
found gone by the transport's keep-alive; how much it can hold meanwhile is bounded by the bytes in flight per peer.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.connector import LoadEnded, LoadOrder
from kv_transfer.counters import TransferCounters
from kv_transfer.layout import KVRegion
from kv_transfer.load import Load, LoadPhase, split_order
from kv_transfer.notifications import Ack, Done, Notification, Release, Renew, encode_notification
from kv_transfer.params import KVTransferParams
from kv_transfer.peers import Handshake, Peer, PeerTable
from kv_transfer.transport import ReadState, Transport, TransportError

logger = logging.getLogger(f"baton.{__name__}")

_QUIET_S = 0.1
_MAX_RETRIES = 1
_MAX_PENDING_RELEASES = 4096


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
    """Runs the loads of one engine. Owned by the connector's thread; nothing here blocks but the transport's copy."""

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
    ) -> None:
        self._name = name
        self._region = region
        self._transport = transport
        self._peers = peers
        self._limits = limits
        self._clock = clock
        self._counters = counters
        self._on_ended = on_ended
        self._serial = itertools.count()
        self._loads: dict[str, Load] = {}
        self._bytes_in_flight = 0
        self._releases: list[tuple[Handshake, KVTransferParams]] = []
        self._is_stopped = False

    @property
    def num_loads(self) -> int:
        """Loads that have not ended."""
        return len(self._loads)

    @property
    def needs_polling(self) -> bool:
        """True while the end of a read or an answer may arrive at any moment."""
        return any(load.phase is not LoadPhase.MEETING for load in self._loads.values())

    def begin(self, order: LoadOrder) -> None:
        """Start a load."""
        now_s = self._clock()
        load = Load(
            order=order,
            reader_id=f"{self._name}/{next(self._serial)}",
            started_s=now_s,
            deadline_s=now_s + self._limits.load_timeout_s,
            next_renewal_s=now_s + self._limits.renewal_period_s,
        )
        self._loads[load.reader_id] = load
        if self._is_stopped:
            load.error = "the connector is closed"
            self._end(load)
        else:
            self._meet_or_read(load)

    def cancel(self, request_id: str) -> None:
        """Nobody wants this load any more; unknown ids are ignored."""
        for load in [load for load in self._loads.values() if load.order.request_id == request_id]:
            load.is_cancelled = True
            self._fail(load, "cancelled")

    def release(self, params: KVTransferParams) -> None:
        """Let a lease end that will not be read; a peer that was never met is met for it, so that it need not wait
        for its lease to expire. If that fails the lease expires by itself."""
        if self._is_stopped:
            return
        if self._peers.find(params.source) is not None:
            self._send_release(params)
        elif len(self._releases) < _MAX_PENDING_RELEASES:
            self._releases.append((self._peers.meet(params.source), params))

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
        """Do what can be done now for every load; True when anything moved."""
        did_anything = self._flush_releases()
        for load in tuple(self._loads.values()):
            did_anything |= self._advance_load(load)
        self._renew()
        return did_anything

    def stop(self) -> None:
        """Give up every load, now and from now on: the transport is closed, which ended all reads."""
        self._is_stopped = True
        for load in tuple(self._loads.values()):
            load.error = load.error or "the connector was closed"
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

    def _meet_or_read(self, load: Load) -> None:
        params = load.order.params
        peer = self._peers.find(params.source)
        if peer is None:
            load.phase = LoadPhase.MEETING
            load.handshake = self._peers.meet(params.source)
            return
        load.peer = peer
        if not _are_blocks_of(load.order.source_block_ids, peer.hello.num_blocks):
            self._fail(load, f"a source block is not among the {peer.hello.num_blocks} blocks of the peer")
        elif not _are_blocks_of(load.order.block_ids, self._region.num_blocks):
            self._fail(load, f"a destination block is not among our {self._region.num_blocks} blocks")
        else:
            load.phase = LoadPhase.READING
            load.waiting.extend(
                split_order(load.order, block_bytes=self._region.block_bytes, part_bytes=self._limits.part_bytes)
            )

    def _advance_meeting(self, load: Load) -> bool:
        assert load.handshake is not None
        if self._peers.find(load.order.params.source) is not None:
            self._meet_or_read(load)
            return True
        if not load.handshake.is_finished:
            return False
        self._fail(load, str(load.handshake.error or "the peer was met and lost again"))
        return True

    def _advance_reading(self, load: Load) -> bool:
        assert load.peer is not None
        before = len(load.reads), len(load.waiting)
        if self._poll_reads(load):
            self._lose_peer(load.peer, f"a read failed: request_id={load.order.request_id}")
            return True
        if load.waiting and self._may_post(load.peer, load.waiting[0].num_bytes):
            part = load.waiting.popleft()
            try:
                read = self._transport.start_read(load.peer.name, part.source_block_ids, part.block_ids)
            except TransportError as error:
                self._lose_peer(load.peer, error.reason)
                return True
            load.reads.append((read, part))
            load.peer.num_reads += 1
            load.peer.bytes_in_flight += part.num_bytes
            self._bytes_in_flight += part.num_bytes
            self._poll_reads(load)
        if not load.waiting and not load.reads:
            load.phase = LoadPhase.CONFIRMING
            self._advance_confirming(load)
        return before != (len(load.reads), len(load.waiting)) or load.phase is LoadPhase.CONFIRMING

    def _advance_confirming(self, load: Load) -> bool:
        now_s = self._clock()
        if now_s < load.next_done_s:
            return False
        assert load.peer is not None
        load.next_done_s = now_s + self._limits.done_retry_s
        self._send(load.peer, Done(lease_id=load.order.params.lease_id, reader=load.reader_id))
        return True

    def _advance_stopping(self, load: Load) -> bool:
        before = len(load.reads)
        if self._poll_reads(load):
            load.quiet_at_s = self._clock() + _QUIET_S
        if load.reads:
            if self._clock() >= load.deadline_s and not load.is_hanging:
                load.is_hanging = True
                logger.warning(
                    "destination blocks stay held until a read that hangs has ended: request_id=%s num_reads=%d",
                    load.order.request_id,
                    len(load.reads),
                )
            return before != len(load.reads)
        if self._clock() < load.quiet_at_s:
            return False
        self._finish_stopping(load)
        return True

    def _finish_stopping(self, load: Load) -> None:
        """No read is left. After a broken connection try once more over a new one: it may only have been idle."""
        has_time = self._clock() < load.deadline_s
        is_connection_lost = load.peer is not None and self._peers.find(load.order.params.source) is not load.peer
        if is_connection_lost and has_time and not load.is_cancelled and load.num_retries < _MAX_RETRIES:
            logger.info("retrying after a new handshake: request_id=%s", load.order.request_id)
            load.num_retries += 1
            load.error = None
            load.peer = None
            load.next_done_s = 0.0
            load.num_bytes = 0
            self._meet_or_read(load)
            return
        if self._peers.find(load.order.params.source) is not None:
            self._send_release(load.order.params)
        self._end(load)

    def _poll_reads(self, load: Load) -> bool:
        """Collect the reads that ended; True when one of them failed."""
        assert load.peer is not None or not load.reads
        has_failed = False
        for entry in tuple(load.reads):
            read, part = entry
            state = read.poll()
            if state is ReadState.ACTIVE:
                continue
            load.reads.remove(entry)
            assert load.peer is not None
            load.peer.num_reads -= 1
            load.peer.bytes_in_flight -= part.num_bytes
            self._bytes_in_flight -= part.num_bytes
            read.close()
            if state is ReadState.DONE:
                load.num_bytes += part.num_bytes
                self._counters.num_bytes += part.num_bytes
            else:
                has_failed = True
                load.quiet_at_s = self._clock() + _QUIET_S
        if load.peer is not None and load.peer.num_reads == 0:
            self._peers.sweep()
        return has_failed

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

    def _lose_peer(self, peer: Peer, reason: str) -> None:
        """The connection to a peer broke: forget it, and give up what was being loaded from it."""
        logger.warning("peer lost: engine_id=%s reason=%s", peer.identity.engine_id, reason)
        self._peers.drop(peer)
        for load in self._loads.values():
            if load.peer is peer and load.phase in (LoadPhase.READING, LoadPhase.CONFIRMING):
                self._fail(load, f"connection to {peer.identity.engine_id} broke: {reason}")

    def _end(self, load: Load) -> None:
        del self._loads[load.reader_id]
        now_s = self._clock()
        ended = load.ended(now_s=now_s)
        self._counters.num_transfers += 1
        self._counters.transfer_s += ended.duration_s
        self._counters.num_failed_blocks += len(ended.failed_block_ids)
        if load.error is None:
            self._counters.num_blocks += len(load.order.block_ids)
        else:
            self._counters.num_failed_loads += 1
            logger.info("load failed: request_id=%s error=%s", load.order.request_id, load.error)
        self._on_ended(ended)

    def _renew(self) -> None:
        now_s = self._clock()
        due: dict[str, tuple[Peer, list[str]]] = {}
        for load in self._loads.values():
            if now_s < load.next_renewal_s:
                continue
            load.next_renewal_s = now_s + self._limits.renewal_period_s
            peer = self._peers.find(load.order.params.source)
            if peer is not None and load.phase is not LoadPhase.STOPPING:
                due.setdefault(peer.name, (peer, []))[1].append(load.order.params.lease_id)
        for peer, lease_ids in due.values():
            self._send(peer, Renew(lease_ids=tuple(lease_ids)))

    def _flush_releases(self) -> bool:
        finished = [params for handshake, params in self._releases if handshake.is_finished]
        if finished:
            self._releases = [entry for entry in self._releases if not entry[0].is_finished]
            for params in finished:
                self._send_release(params)
        return bool(finished)

    def _send_release(self, params: KVTransferParams) -> None:
        peer = self._peers.find(params.source)
        if peer is not None:
            self._send(peer, Release(lease_id=params.lease_id))

    def _send(self, peer: Peer, notification: Notification) -> None:
        try:
            self._transport.send(peer.name, encode_notification(notification))
        except TransportError as error:
            self._lose_peer(peer, error.reason)


def _are_blocks_of(block_ids: tuple[int, ...], num_blocks: int) -> bool:
    return all(0 <= block_id < num_blocks for block_id in block_ids)
