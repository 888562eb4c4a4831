"""Hand-overs between virtual workers: real leases and announcements, and reads that take time but move no bytes."""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable
from functools import partial

from kv_transfer.connector import (
    NO_EVENTS,
    Connector,
    ConnectorEvents,
    ConnectorOrders,
    LoadEnded,
    LoadOrder,
    SchedulerConnector,
    StreamOrder,
)
from kv_transfer.fault_options import FaultOptions
from kv_transfer.faults import FaultPlan
from kv_transfer.layout import KVLayout
from kv_transfer.params import Hello, KVTransferParams, PeerIdentity
from kv_transfer.peer.announcements import Announcements
from kv_transfer.peer.counters import TransferCounters
from kv_transfer.peer.lease import Completion, LeaseTable
from kv_transfer.peer.notifications import Announce
from kv_transfer.peer.scheduler_connector import PeerSchedulerConnector
from kv_transfer.stats import TransferStats
from simulation.faults.loads import LoadFault, draw_fault
from simulation.faults.process import Process
from simulation.kv.awaited import Renewals, Stream
from simulation.kv.token_times import TokenTimes
from simulation.machine import TransferModel

HOUSEKEEPING_PERIOD_S = 0.25
"""How often leases are checked, as by a real connector."""

RENEWALS_PER_TTL = 3
ANSWER_TIMEOUT_S = 5.0
"""How long a reader waits for a source that does not answer."""

ANNOUNCE_PERIOD_S = 0.05
"""How often the reader of a prompt in host memory is told of new blocks."""


class VirtualFabric:
    """Shared by the workers of a cluster: the workers that can read from each other, by name, and the times of tokens
    that are reported together.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.transfers: dict[str, VirtualTransfers] = {}
        self.token_times = TokenTimes()

    def find(self, identity: PeerIdentity) -> VirtualTransfers | None:
        """This incarnation of a worker, if it exists."""
        transfers = self.transfers.get(identity.engine_id)
        return transfers if transfers is not None and transfers.identity == identity else None


class VirtualTransfers:
    """Implements ``PeerWorkerConnector`` in virtual time: loads and streams end when the transfer model says.

    ``wake`` is called when there is something to collect.
    """

    has_hung_read = False

    def __init__(
        self,
        *,
        fabric: VirtualFabric,
        identity: PeerIdentity,
        layout: KVLayout,
        model: TransferModel,
        clock: Callable[[], float],
        process: Process,
        wake: Callable[[], None],
        lease_ttl_s: float,
        streamed: bool,
    ) -> None:
        self.identity = identity
        self.is_alive = True
        self.leases = LeaseTable(ttl_s=lease_ttl_s, clock=clock)
        self.announcements = Announcements(ttl_s=lease_ttl_s, clock=clock, period_s=ANNOUNCE_PERIOD_S)
        half = PeerSchedulerConnector(
            identity=identity,
            layout=layout,
            leases=self.leases,
            announcements=self.announcements if streamed else None,
        )
        self.scheduler_half = SchedulerConnector(
            source=half, producer=half, consumer=half, take_orders=half.take_orders
        )
        self._fabric = fabric
        self._model = model
        self._block_bytes = layout.block_bytes
        self._clock = clock
        self._wake = wake
        self._renewal_period_s = lease_ttl_s / RENEWALS_PER_TTL
        self._renewals = Renewals()
        self._random = random.Random(identity.engine_id)
        self._link_free_s = 0.0
        self._process = process
        self._counters = TransferCounters()
        self.faults = FaultPlan(FaultOptions(), self._counters)
        self._ended: deque[LoadEnded] = deque()
        self._ended_streams: deque[str] = deque()
        self._loading: set[str] = set()
        self._cancelled: set[str] = set()
        self._streams: dict[str, Stream] = {}
        self._by_request: dict[str, Stream] = {}
        self._num_told_ends = 0
        self._housekeeping: asyncio.TimerHandle | None = None
        self._telling: asyncio.TimerHandle | None = None
        self.leases.on_change = self._keep_house
        self.announcements.on_change = self._tell_soon
        fabric.transfers[identity.engine_id] = self

    @property
    def connector(self) -> Connector:
        """Both halves."""
        return Connector(scheduler=self.scheduler_half, worker=self)

    @property
    def num_peers(self) -> int:
        """The number of peers from which this worker could read."""
        return len(self._fabric.transfers) - 1

    def execute(self, orders: ConnectorOrders) -> None:
        """Start what was ordered."""
        for params in orders.expected:
            self._await_lease(params)
        for params in orders.passed_on:
            if self._renewals.awaited.pop(params.lease_id, None) is not None:
                self._at_source(params, LeaseTable.renew)
        for stream in orders.streams:
            self._begin_stream(stream)
        for order in orders.loads:
            self._begin_load(order)
        self._cancelled.update(request_id for request_id in orders.cancelled_loads if request_id in self._loading)
        for stream_id in orders.cancelled_streams:
            self._cancel_stream(stream_id)
        for params in orders.releases:
            self._renewals.awaited.pop(params.lease_id, None)
            self._at_source(params, LeaseTable.abort)

    def collect(self) -> ConnectorEvents:
        """Take what ended since the last call, each event once."""
        self.leases.expire()
        loads, self._ended = tuple(self._ended), deque()
        streams, self._ended_streams = tuple(self._ended_streams), deque()
        events = ConnectorEvents(loads=loads, leases=self.leases.take_ended(), ended_streams=streams)
        return NO_EVENTS if events.is_empty else events

    def stats(self) -> TransferStats:
        """Counters since the start."""
        announced = self.announcements.num_announced_blocks
        return self._counters.snapshot(self.leases.counts(), num_announced_blocks=announced)

    def accept(self, hello: Hello) -> Hello:
        """Virtual workers know each other from the start.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(f"{self.identity.engine_id} is already connected to {hello.identity.engine_id}")

    def close(self) -> None:
        """Leave the fabric: all reads by this worker and from it fail. Idempotent."""
        if not self.is_alive:
            return
        self.is_alive = False
        self._fabric.transfers.pop(self.identity.engine_id, None)
        for timer in (self._housekeeping, self._telling):
            if timer is not None:
                timer.cancel()
        self.leases.on_change = self.announcements.on_change = None
        self.leases.abort_all()

    # ---- time

    def _at(self, when_s: float, action: Callable[[], object]) -> None:
        self._fabric.loop.call_at(when_s, self._if_alive, action)

    def _if_alive(self, action: Callable[[], object]) -> None:
        if self.is_alive and not self._process.keeps(partial(self._if_alive, action)):
            action()

    def _at_source(self, params: KVTransferParams, action: Callable[[LeaseTable, str], object]) -> None:
        """Change a lease at a peer when a message that is sent now arrives there."""

        def arrive() -> None:
            source = self._fabric.find(params.source)
            if source is not None:
                source._if_alive(lambda: action(source.leases, params.lease_id))

        self._at(self._clock() + self._model.latency_s, arrive)

    def _use_links(self, source: VirtualTransfers, num_blocks: int, begin_s: float, *, slowness: float = 1.0) -> float:
        """When a read of ``num_blocks`` that begins at ``begin_s`` ends, after earlier reads on the same links. It
        takes ``slowness`` times as long as usual.
        """
        num_bytes = num_blocks * self._block_bytes
        begin_s = max(begin_s, self._link_free_s, source._link_free_s)
        end_s = begin_s + slowness * max(self._model.seconds(num_bytes), source._model.seconds(num_bytes))
        self._link_free_s = source._link_free_s = end_s
        self._counters.num_blocks += num_blocks
        self._counters.num_bytes += num_bytes
        return end_s

    # ---- leases

    def _await_lease(self, params: KVTransferParams) -> None:
        self._renewals.awaited[params.lease_id] = params
        self._keep_house()

    def _keep_house(self) -> None:
        """Check leases from now on, as long as there are some."""
        if self._housekeeping is None and self.is_alive:
            when_s = self._clock() + HOUSEKEEPING_PERIOD_S
            self._housekeeping = self._fabric.loop.call_at(when_s, self._look_at_leases)
        if self.leases.num_ended != self._num_told_ends:
            self._num_told_ends = self.leases.num_ended
            self._wake()

    def _look_at_leases(self) -> None:
        if self._process.keeps(self._look_at_leases):
            return
        self._housekeeping = None
        self.leases.expire()
        now_s = self._clock()
        if now_s >= self._renewals.next_s:
            self._renewals.next_s = now_s + self._renewal_period_s
            for params in self._renewals.awaited.values():
                self._at_source(params, LeaseTable.renew)
        if self.leases.num_live or self._renewals.awaited:
            self._keep_house()

    # ---- loads

    def _begin_load(self, order: LoadOrder) -> None:
        params, now_s = order.params, self._clock()
        self._await_lease(params)
        self._loading.add(order.request_id)
        source, stream = self._fabric.find(params.source), self._take_stream(order)
        if source is None:
            gone = LoadFault(failed_block_ids=order.block_ids, error="its source is gone")
            self._at(now_s, lambda: self._end_load(order, now_s, gone))
            return
        slowness = math.exp(self._model.spread * self._random.gauss(0.0, 1.0))
        latency_s = slowness * self._model.latency_s
        num_missing, ready_s, num_streamed = len(order.block_ids), now_s, 0
        if stream is not None:
            covered = stream.held | stream.reading if stream.epoch == params.epoch else {}
            wanted = zip(order.block_ids, order.source_block_ids, strict=True)
            num_streamed = sum(covered.get(block_id) == source_id for block_id, source_id in wanted)
            num_missing, ready_s = num_missing - num_streamed, max(now_s, stream.ends_s)
        if num_missing:
            ready_s = max(ready_s, self._use_links(source, num_missing, now_s + latency_s, slowness=slowness))
        self._counters.num_streamed_blocks += num_streamed
        self._counters.num_streamed_bytes += num_streamed * self._block_bytes
        fault = draw_fault(self.faults, order)
        self._at(ready_s + latency_s + fault.late_s, lambda: self._confirm(order, now_s, latency_s, fault))

    def _confirm(self, order: LoadOrder, begun_s: float, latency_s: float, fault: LoadFault) -> None:
        """Tell the source that the read is done; it answers whether the lease was alive until then."""
        source = self._fabric.find(order.params.source)
        lease_id, reader = order.params.lease_id, f"{self.identity.engine_id}/{order.request_id}"
        if source is not None and source._process.keeps(lambda: source.leases.complete(lease_id, reader=reader)):
            lost = LoadFault(failed_block_ids=order.block_ids, error="its source is silent")
            self._at(self._clock() + ANSWER_TIMEOUT_S, lambda: self._end_load(order, begun_s, lost))
            return
        if source is not None and fault.ends_lease:
            source.leases.expire_lease(lease_id)
        if source is None or source.leases.complete(lease_id, reader=reader) is not Completion.OK:
            fault = LoadFault(failed_block_ids=order.block_ids, error="its lease ended before it was read")
        self._at(self._clock() + latency_s, lambda: self._end_load(order, begun_s, fault))

    def _end_load(self, order: LoadOrder, begun_s: float, fault: LoadFault) -> None:
        self._loading.discard(order.request_id)
        self._renewals.awaited.pop(order.params.lease_id, None)
        is_cancelled = order.request_id in self._cancelled
        self._cancelled.discard(order.request_id)
        ended = LoadEnded(
            request_id=order.request_id,
            failed_block_ids=fault.failed_block_ids,
            num_bytes=len(order.block_ids) * self._block_bytes,
            duration_s=self._clock() - begun_s,
            error=fault.error,
            is_cancelled=is_cancelled,
        )
        self._counters.add_load(ended)
        self._ended.append(ended)
        self._wake()

    # ---- streams

    def _begin_stream(self, order: StreamOrder) -> None:
        source = self._fabric.find(order.params.source)
        if source is None or order.gate.is_closed:
            return
        stream = self._streams[order.stream_id] = self._by_request[order.request_id] = Stream(order=order)
        self._counters.num_streams += 1
        self._subscribe(stream)

    def _subscribe(self, stream: Stream) -> None:
        """Subscribe to announcements, and again before the source forgets the subscription."""
        order = stream.order
        source = self._fabric.find(order.params.source)
        if source is None or self._by_request.get(order.request_id) is not stream:
            return
        now_s = self._clock()
        name = self.identity.engine_id
        source._at(now_s + self._model.latency_s, lambda: source.announcements.subscribe(order.request_id, name))
        self._at(now_s + self._renewal_period_s, lambda: self._subscribe(stream))

    def _tell_soon(self) -> None:
        if self._telling is None and self.is_alive:
            self._telling = self._fabric.loop.call_at(self._clock(), self._tell)

    def _tell(self) -> None:
        """Announce complete blocks to readers. Paced announcements follow in a later call."""
        if self._process.keeps(self._tell):
            return
        self._telling = None
        now_s = self._fabric.loop.time()
        for reader, announce in self.announcements.take_due():
            self._at(now_s + self._model.latency_s, partial(self._reach, reader, announce))
        if self.announcements.has_due:
            self._telling = self._fabric.loop.call_at(now_s + ANNOUNCE_PERIOD_S / 2, self._tell)

    def _reach(self, reader: str, announce: Announce) -> None:
        peer = self._fabric.transfers.get(reader)
        if peer is not None:
            peer._if_alive(lambda: peer.on_announce(announce, source=self))

    def on_announce(self, announce: Announce, *, source: VirtualTransfers) -> None:
        """Read the blocks that a source announces, if a stream here waits for them."""
        stream = self._by_request.get(announce.request_id)
        if stream is None or announce.epoch < stream.epoch:
            return
        if announce.epoch > stream.epoch:
            stream.epoch = announce.epoch
            stream.held.clear()
            stream.reading.clear()
        order = stream.order
        ours = dict(zip(order.places, order.block_ids, strict=True))
        pairs = zip(announce.places, announce.block_ids, strict=True)
        read = {ours[place]: block_id for place, block_id in pairs if place in ours}
        for block_id in (stream.held | stream.reading) & read.keys():
            del read[block_id]
        if not read or not order.gate.begin_read():
            return
        stream.reading |= read
        stream.num_reads += 1
        begin_s = self._fabric.loop.time() + self._model.latency_s
        stream.ends_s = self._use_links(source, len(read), begin_s)
        self._at(stream.ends_s, lambda: self._end_stream_read(stream, read, announce.epoch))

    def _end_stream_read(self, stream: Stream, read: dict[int, int], epoch: int) -> None:
        gate = stream.order.gate
        gate.end_read()
        stream.num_reads -= 1
        if stream.epoch == epoch:
            stream.held |= read
            for block_id in read:
                stream.reading.pop(block_id, None)
        if gate.is_closed and gate.is_awaited and not stream.num_reads:
            self._counters.num_ended_streams += 1
            self._ended_streams.append(stream.order.stream_id)
            self._wake()

    def _take_stream(self, order: LoadOrder) -> Stream | None:
        stream = self._streams.pop(order.stream_id, None) if order.stream_id is not None else None
        if stream is not None:
            self._forget(stream)
        return stream

    def _cancel_stream(self, stream_id: str) -> None:
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        if self._by_request.get(stream.order.request_id) is stream:
            del self._by_request[stream.order.request_id]
