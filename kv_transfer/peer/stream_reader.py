"""Reads prompts while their source computes them: subscribes, reads what is announced, and waits to be taken over.

Streaming is speculative, and costs only bandwidth when it fails. Blocks count only if a load takes them over and its
lease covers the same blocks under the same epoch. So a stream never retries and reports no failure; it just stops.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kv_transfer.connector import LoadOrder, StreamOrder
from kv_transfer.layout import KVRegion
from kv_transfer.peer.counters import TransferCounters
from kv_transfer.peer.notifications import Announce, Notification, Subscribe
from kv_transfer.peer.part_reads import PartReads, ReaderLimits
from kv_transfer.peer.peers import Peer, PeerTable
from kv_transfer.peer.stream import Stream, Takeover
from kv_transfer.transport import ReadState, TransportError

logger = logging.getLogger(f"baton.{__name__}")

QUIET_S = 0.1
"""For this long after a read failed, its destination may still be written."""


class StreamReader:
    """The streams of one engine. Owned by the connector's thread.

    A cancelled stream is reported to ``on_ended`` when its last read ended, unless its gate already told the scheduler
    that no read was in flight. ``lose_peer`` is called when a connection broke or a read hangs.
    """

    def __init__(
        self,
        *,
        region: KVRegion,
        reads: PartReads,
        peers: PeerTable,
        limits: ReaderLimits,
        clock: Callable[[], float],
        counters: TransferCounters,
        send: Callable[[Peer, Notification], None],
        lose_peer: Callable[[Peer, str], None],
        on_ended: Callable[[str], None],
    ) -> None:
        self._region = region
        self._reads = reads
        self._peers = peers
        self._limits = limits
        self._clock = clock
        self._counters = counters
        self._send = send
        self._lose_peer = lose_peer
        self._on_ended = on_ended
        self._streams: dict[str, Stream] = {}
        self._by_request: dict[str, Stream] = {}
        self._is_closing = False

    @property
    def needs_polling(self) -> bool:
        """True while a read may end at any moment."""
        return any(stream.reads for stream in self._streams.values())

    @property
    def is_listening(self) -> bool:
        """True while an announcement may arrive."""
        return any(not stream.is_stopped for stream in self._streams.values())

    def begin(self, order: StreamOrder) -> None:
        """Begin to follow a prompt, unless the stream was cancelled in the meantime."""
        if order.gate.is_closed or self._is_closing:
            return
        stream = Stream(order=order)
        older = self._by_request.get(order.request_id)
        if older is not None:
            self._stop(older)
        self._streams[order.stream_id] = self._by_request[order.request_id] = stream
        self._counters.num_streams += 1
        self._meet(stream)

    def cancel(self, stream_id: str) -> None:
        """Cancel a stream whose gate is closed. Unknown ids are ignored."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._stop(stream)
            self._end_if_quiet(stream)

    def take(self, order: LoadOrder, *, peer: Peer | None) -> Takeover | None:
        """End a stream whose destination a load takes over. The load gets its blocks and its reads in flight."""
        stream = self._streams.get(order.stream_id) if order.stream_id is not None else None
        if stream is None:
            return None
        self._stop(stream)
        del self._streams[stream.order.stream_id]
        return stream.hand_to(order, peer=peer, block_bytes=self._region.block_bytes, limits=self._limits)

    def on_announce(self, announce: Announce, *, sender: str) -> bool:
        """Handle a source's announcement; False when no stream waits for it, or it is invalid."""
        stream = self._by_request.get(announce.request_id)
        if stream is None or stream.peer is None or stream.peer.name != sender or announce.epoch < stream.epoch:
            return False
        if any(block_id >= stream.peer.hello.num_blocks for block_id in announce.block_ids):
            return False
        if announce.epoch > stream.epoch:
            stream.begin_epoch(announce.epoch)
        stream.enqueue(announce, block_bytes=self._region.block_bytes, limits=self._limits)
        return True

    def advance(self, *, may_post: bool) -> bool:
        """Do what can be done now; True when anything changed. New reads begin only with ``may_post``."""
        did_anything = False
        for stream in tuple(self._streams.values()):
            did_anything |= self._poll(stream)
            if not stream.is_stopped:
                did_anything |= self._follow(stream, may_post=may_post)
            elif stream.order.gate.is_closed:
                did_anything |= self._end_if_quiet(stream)
        return did_anything

    def stop_peer(self, peer: Peer) -> None:
        """Stop reading over a connection that was lost."""
        for stream in tuple(self._streams.values()):
            if stream.peer is peer:
                self._stop(stream)

    def give_up(self) -> None:
        """Stop all streams, present and future. A stream with reads in flight ends when ``advance`` saw them end."""
        self._is_closing = True
        for stream in self._streams.values():
            self._stop(stream)

    def end_all(self) -> None:
        """End all remaining streams: the transport is closed, so their reads have ended."""
        for stream in tuple(self._streams.values()):
            stream.num_failed_reads += len(stream.reads)
            stream.reads.clear()
            stream.quiet_at_s = self._clock()
            self._end_if_quiet(stream)

    def _follow(self, stream: Stream, *, may_post: bool) -> bool:
        if stream.order.gate.is_closed:
            self._stop(stream)
            return True
        if stream.peer is None:
            return self._meet(stream)
        if self._peers.find(stream.source) is not stream.peer:
            self._stop(stream)
            return True
        did_anything = self._subscribe(stream, stream.peer)
        return self._post(stream, stream.peer) or did_anything if may_post else did_anything

    def _meet(self, stream: Stream) -> bool:
        stream.peer = self._peers.find(stream.source)
        if stream.peer is not None:
            self._subscribe(stream, stream.peer)
            return True
        if stream.handshake is None:
            stream.handshake = self._peers.meet(stream.source)
        if not stream.handshake.is_finished:
            return False
        logger.info("not streamed: request_id=%s error=%s", stream.order.request_id, stream.handshake.error)
        self._stop(stream)
        return True

    def _subscribe(self, stream: Stream, peer: Peer) -> bool:
        """Subscribe, and renew before the source forgets the subscription: the prompt may wait there for long."""
        now_s = self._clock()
        if now_s < stream.next_subscribe_s:
            return False
        stream.next_subscribe_s = now_s + self._limits.renewal_period_s
        self._send(peer, Subscribe(request_id=stream.order.request_id))
        return True

    def _post(self, stream: Stream, peer: Peer) -> bool:
        if not stream.waiting or not self._reads.may_post(peer, stream.waiting[0]):
            return False
        if any(epoch != stream.epoch for _, epoch in stream.reads):
            return False  # a read of an older epoch could overwrite newer data
        if not stream.order.gate.begin_read():
            self._stop(stream)
            return True
        try:
            entry = self._reads.post(peer, stream.waiting.popleft())
        except TransportError as error:
            stream.order.gate.end_read()
            self._stop(stream)
            self._lose_peer(peer, error.reason)
            return True
        if not stream.reads:
            stream.oldest_read_s = self._clock()
        stream.reads.append((entry, stream.epoch))
        return True

    def _poll(self, stream: Stream) -> bool:
        """Collect the reads that ended; True when at least one did. Also stops the stream if a read hangs."""
        num_before = len(stream.reads)
        for entry in tuple(stream.reads):
            part_read, epoch = entry
            state = self._reads.poll(part_read)
            if state is ReadState.ACTIVE:
                continue
            stream.reads.remove(entry)
            stream.oldest_read_s = self._clock()
            if state is ReadState.FAILED:
                self._note_failure(stream, part_read.peer)
                continue
            stream.order.gate.end_read()
            if epoch == stream.epoch:
                stream.hold(part_read.part, self._reads.corrupt_blocks(part_read.part))
        if stream.reads and not stream.is_stopped:
            self._check_hanging(stream)
        return len(stream.reads) < num_before

    def _note_failure(self, stream: Stream, peer: Peer) -> None:
        stream.num_failed_reads += 1
        stream.quiet_at_s = self._clock() + QUIET_S
        self._stop(stream)
        self._lose_peer(peer, "a read failed")

    def _check_hanging(self, stream: Stream) -> None:
        """Stop the stream if a read hangs. As with loads, nothing more is read from that peer while it hangs."""
        if self._clock() - stream.oldest_read_s >= self._limits.load_timeout_s:
            peer = stream.reads[0][0].peer
            logger.warning("an early read hangs: request_id=%s peer=%s", stream.order.request_id, peer.name)
            self._stop(stream)
            self._lose_peer(peer, "a read hangs")

    def _stop(self, stream: Stream) -> None:
        stream.is_stopped = True
        stream.waiting.clear()
        if self._by_request.get(stream.order.request_id) is stream:
            del self._by_request[stream.order.request_id]

    def _end_if_quiet(self, stream: Stream) -> bool:
        """Report a cancelled stream whose destination nothing writes any more."""
        if stream.reads or (stream.num_failed_reads and self._clock() < stream.quiet_at_s):
            return False
        for _ in range(stream.num_failed_reads):
            stream.order.gate.end_read()
        del self._streams[stream.order.stream_id]
        if stream.order.gate.is_awaited:
            self._counters.num_ended_streams += 1
            self._on_ended(stream.order.stream_id)
        return True
