"""The worker's half of every connector that reads from peers: one thread posts reads, polls, answers and reports."""

from __future__ import annotations

import functools
import logging
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

from kv_transfer.connector import (
    NO_EVENTS,
    ConnectorEvents,
    ConnectorOrders,
    LoadEnded,
    Rendezvous,
    WakeCallback,
)
from kv_transfer.errors import PeerUnreachableError
from kv_transfer.layout import KVLayout, KVRegion
from kv_transfer.memory.block_memory import BlockChecksums
from kv_transfer.params import Hello, PeerIdentity
from kv_transfer.peer.announcements import Announcements
from kv_transfer.peer.counters import TransferCounters
from kv_transfer.peer.handshake import build_hello, check_hello
from kv_transfer.peer.lease import Completion, LeaseTable
from kv_transfer.peer.notifications import (
    Ack,
    Announce,
    Done,
    MalformedNotificationError,
    Notification,
    Release,
    Renew,
    Subscribe,
    decode_notification,
    encode_notification,
)
from kv_transfer.peer.part_reads import ReaderLimits
from kv_transfer.peer.peers import PeerTable
from kv_transfer.peer.poll_period import LAST_PERIOD_S, LISTEN_PERIOD_S, QUIET_PERIOD_S, PollPeriod
from kv_transfer.peer.reader import Reader
from kv_transfer.stats import TransferStats
from kv_transfer.transfer_options import TransferOptions
from kv_transfer.transport import Transport, TransportError

logger = logging.getLogger(f"baton.{__name__}")

_IDLE_PERIOD_S = 0.25
_JOIN_TIMEOUT_S = 30.0
_DRAIN_TIMEOUT_S = 5.0

Event = TypeVar("Event")


class TransferWorker:
    """Implements ``PeerWorkerConnector`` over a ``Transport``, which only its thread uses.

    The thread sleeps until there is something to do. A transport that needs polling is polled with ``PollPeriod``, but
    every 5 ms while blocks of a prompt may be announced by us or to us (20 ms where announcements are paced). Deadlines
    are checked at least four times per second.
    """

    def __init__(
        self,
        *,
        options: TransferOptions,
        identity: PeerIdentity,
        layout: KVLayout,
        region: KVRegion,
        transport: Transport,
        rendezvous: Rendezvous,
        leases: LeaseTable,
        announcements: Announcements,
        wake: WakeCallback,
        clock: Callable[[], float],
        counters: TransferCounters,
        memory: BlockChecksums | None = None,
    ) -> None:
        self._hello = build_hello(identity=identity, layout=layout, region=region, agent_metadata=transport.metadata)
        self._accept_timeout_s = options.handshake_timeout_s
        self._transport = transport
        self._leases = leases
        self._announcements = announcements
        self._wake = wake
        self._clock = clock
        self._counters = counters
        self._ended: deque[LoadEnded] = deque()
        self._stalled, self._ended_streams = deque[str](), deque[str]()
        self._num_reported = 0
        self._inbox: deque[Callable[[], None]] = deque()
        self._condition = threading.Condition()
        self._has_notice = False
        self._is_closing = self._is_stopped = self._has_failed = False
        self._poll_period = PollPeriod()
        self._peers = PeerTable(
            hello=self._hello,
            transport=transport,
            rendezvous=rendezvous,
            clock=clock,
            handshake_timeout_s=options.handshake_timeout_s,
            post=self._post,
            counters=self._counters,
        )
        self._reader = Reader(
            name=f"{identity.engine_id}/{identity.incarnation}",
            region=region,
            transport=transport,
            peers=self._peers,
            limits=_limits(options),
            clock=clock,
            counters=self._counters,
            on_ended=self._ended.append,
            on_stalled=self._stalled.append,
            on_stream_ended=self._ended_streams.append,
            memory=memory,
            on_verified=self._notify,
        )
        leases.on_change = functools.partial(self._notify, expects_reader=True)
        announcements.on_change = self._notify
        transport.on_event = self._notify
        self._thread = threading.Thread(target=self._run, name=f"baton-kv-{identity.engine_id}", daemon=True)
        self._thread.start()

    @property
    def hello(self) -> Hello:
        """The hello with which this connector introduces itself."""
        return self._hello

    @property
    def peers(self) -> PeerTable:
        """The peers that this connector knows. Other threads may only use members marked "from any thread"."""
        return self._peers

    @property
    def has_reads(self) -> bool:
        """True while a read may write into our region."""
        return self._reader.reads.has_any

    @property
    def has_hung_read(self) -> bool:
        """True while a read hangs that only the end of this process is sure to end."""
        return self._reader.reads.has_hung

    @property
    def is_alive(self) -> bool:
        """False once the thread has failed or ended."""
        return not self._has_failed and self._thread.is_alive()

    def execute(self, orders: ConnectorOrders) -> None:
        """Start what was ordered."""
        if not orders.is_empty and not self._post(functools.partial(self._begin, orders)):
            self._begin(orders)
            self._wake()

    def collect(self) -> ConnectorEvents:
        """Take what ended since the last call, each event once."""
        self._leases.expire()
        events = ConnectorEvents(
            loads=_take_all(self._ended),
            leases=self._leases.take_ended(),
            stalled=_take_all(self._stalled),
            ended_streams=_take_all(self._ended_streams),
        )
        return NO_EVENTS if events.is_empty else events

    def stats(self) -> TransferStats:
        """Counters since the start."""
        num_announced_blocks = self._announcements.num_announced_blocks
        return self._counters.snapshot(self._leases.counts(), num_announced_blocks=num_announced_blocks)

    def accept(self, hello: Hello) -> Hello:
        """Handle a peer's introduction, and answer with our own hello.

        Raises:
            HandshakeRefusedError: Protocol version or layout differ.
            TransportError: The peer's metadata cannot be used.
            PeerUnreachableError: This connector is closed, or its thread did not handle the peer in time.
        """
        check_hello(ours=self._hello, theirs=hello)
        admitted: Future[None] = Future()
        if not self._post(functools.partial(self._admit, hello, admitted)):
            raise PeerUnreachableError(engine_id=self._hello.identity.engine_id, reason="its connector is closed")
        try:
            admitted.result(timeout=self._accept_timeout_s)
        except FutureTimeoutError as error:
            reason = f"its connector did not answer within {self._accept_timeout_s:g} s"
            raise PeerUnreachableError(engine_id=self._hello.identity.engine_id, reason=reason) from error
        return self._hello

    def close(self) -> None:
        """Stop the threads and deregister the memory. Idempotent."""
        self._is_closing = True
        self._notify()
        self._thread.join(_JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            frame = sys._current_frames().get(self._thread.ident or 0)
            where = "".join(traceback.format_stack(frame)) if frame is not None else "unknown"
            logger.error("the connector's thread did not stop within %g s; it is at:\n%s", _JOIN_TIMEOUT_S, where)

    def _post(self, command: Callable[[], None]) -> bool:
        """Let the connector's thread run a command; False when the thread has stopped. From any thread."""
        with self._condition:
            if self._is_stopped:
                return False
            self._inbox.append(command)
            self._condition.notify()
            return True

    def _notify(self, *, expects_reader: bool = False) -> None:
        """Wake the connector's thread; with ``expects_reader`` it then polls often. From any thread."""
        with self._condition:
            if expects_reader:
                self._poll_period.restart()
            self._has_notice = True
            self._condition.notify()

    def _begin(self, orders: ConnectorOrders) -> None:
        for params in orders.expected:
            self._reader.heartbeat.expect(params)
        for params in orders.passed_on:
            self._reader.heartbeat.pass_on(params)
        for stream in orders.streams:
            self._reader.streams.begin(stream)
        for order in orders.loads:
            self._reader.begin(order)
        for request_id in orders.cancelled_loads:
            self._reader.cancel(request_id)
        for stream_id in orders.cancelled_streams:
            self._reader.streams.cancel(stream_id)
        for params in orders.releases:
            self._reader.heartbeat.release(params)

    def _admit(self, hello: Hello, admitted: Future[None]) -> None:
        try:
            self._peers.admit(hello, is_introduction=True)
        except (TransportError, PeerUnreachableError) as error:
            admitted.set_exception(error)
        else:
            admitted.set_result(None)

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._sleep(did_anything=self._turn())
        except Exception:
            self._has_failed = True
            logger.exception("the connector's thread stopped; every load fails from now on")
        finally:
            self._shut_down()

    def _turn(self) -> bool:
        """One iteration of the thread's loop; True when anything happened."""
        did_anything = False
        while self._inbox:
            self._inbox.popleft()()
            did_anything = True
        self._leases.expire()
        self._peers.expire_idle()
        for sender, message in self._transport.receive():
            peer = self._peers.heard(sender)
            if peer is not None:
                self._reader.heard(peer)
            self._take(sender, message)
            did_anything = True
        for reader, announce in self._announcements.take_due():
            self._tell(reader, announce)
            did_anything = True
        did_anything |= self._reader.advance()
        self._report()
        return did_anything

    def _report(self) -> None:
        """Wake the engine if something ended since the last wake-up."""
        counters = self._counters
        num_events = counters.num_transfers + counters.num_stalled_loads + counters.num_ended_streams
        num_events += self._leases.num_ended
        if num_events != self._num_reported:
            self._num_reported = num_events
            self._wake()

    def _take(self, sender: str, message: bytes) -> None:
        try:
            notification = decode_notification(message)
        except MalformedNotificationError as error:
            self._counters.num_unknown_notifications += 1
            logger.debug("notification ignored: sender=%s error=%s", sender, error)
            return
        match notification:
            case Done():
                self._complete(sender, notification)
            case Ack():
                self._counters.num_unknown_notifications += not self._reader.on_ack(notification, sender=sender)
            case Release():
                self._leases.abort(notification.lease_id)
            case Renew():
                for lease_id in notification.lease_ids:
                    self._leases.renew(lease_id)
            case Subscribe():
                self._announcements.subscribe(notification.request_id, sender)
            case Announce():
                is_known = self._reader.streams.on_announce(notification, sender=sender)
                self._counters.num_unknown_notifications += not is_known

    def _complete(self, sender: str, done: Done) -> None:
        completion = self._leases.complete(done.lease_id, reader=done.reader)
        self._tell(sender, Ack(lease_id=done.lease_id, reader=done.reader, is_alive=completion is Completion.OK))

    def _tell(self, reader: str, notification: Notification) -> None:
        try:
            self._transport.send(reader, encode_notification(notification))
        except TransportError as error:
            logger.info("a message to a reader could not be sent: %s", error)
            self._peers.drop_by_name(reader)

    def _sleep(self, *, did_anything: bool) -> None:
        with self._condition:
            if self._inbox or self._has_notice or self._is_closing:
                self._has_notice = False
                return
            if did_anything:
                self._poll_period.restart()
                if self._reader.needs_polling:
                    return
            self._condition.wait(self._next_period_s())
            self._has_notice = False

    def _next_period_s(self) -> float:
        listen_period_s = QUIET_PERIOD_S if self._announcements.is_paced else LISTEN_PERIOD_S
        if not self._transport.needs_polling:
            return listen_period_s if self._announcements.has_due else _IDLE_PERIOD_S
        if self._reader.needs_polling or self._leases.num_live:
            return self._poll_period.next_busy_s()
        is_listening = self._announcements.num_open or self._reader.streams.is_listening
        return listen_period_s if is_listening else self._poll_period.next_quiet_s()

    def _shut_down(self) -> None:
        """The last call in the thread. Commands that were posted until now are still answered.

        A step may fail here, for example with the same error that ended the thread. The other steps still run, so that
        the end of every load and lease is reported.
        """
        self._leases.on_change = None
        self._announcements.on_change = None
        for step in (
            self._peers.stop_meeting,
            self._reader.give_up,
            self._drain,
            self._transport.close,
            self._reader.end_all,
            self._reader.close,
            self._leases.abort_all,
            self._peers.close,
        ):
            self._take_step(step)
        with self._condition:
            self._is_stopped = True
            commands = tuple(self._inbox)
            self._inbox.clear()
        for command in commands:
            self._take_step(command)
        self._wake()

    def _take_step(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception:
            self._has_failed = True
            logger.exception("the connector did not end cleanly")

    def _drain(self) -> None:
        """Wait for reads in flight to end: closing the transport during a read can crash the peer that serves it."""
        deadline_s = self._clock() + _DRAIN_TIMEOUT_S
        self._reader.advance()
        while self._reader.reads.has_any and self._clock() < deadline_s:
            with self._condition:
                self._condition.wait(LAST_PERIOD_S)
            self._reader.advance()


def _limits(options: TransferOptions) -> ReaderLimits:
    return ReaderLimits(
        load_timeout_s=options.load_timeout_s,
        renewal_period_s=options.lease_ttl_s / 3,
        answer_timeout_s=options.answer_timeout_s,
        hung_read_timeout_s=options.hung_read_timeout_s,
    )


def _take_all(events: deque[Event]) -> tuple[Event, ...]:
    """Empty a queue that another thread fills."""
    return tuple(events.popleft() for _ in range(len(events)))
