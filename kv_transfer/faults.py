"""Fault injection: a decorator around any transport and rendezvous, deterministic by seed or by schedule.

Each kind of fault has its own stream of random numbers. So the decision for the n-th occasion of a fault does not
depend on the other faults. Faults are injected below the protocol, which cannot tell them from real ones.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from kv_transfer.connector import Rendezvous
from kv_transfer.errors import HandshakeRefusedError
from kv_transfer.fault_options import Fault, FaultOptions
from kv_transfer.memory.block_memory import BlockMemory
from kv_transfer.params import Hello
from kv_transfer.peer.counters import TransferCounters
from kv_transfer.peer.lease import LeaseTable
from kv_transfer.peer.notifications import Done, MalformedNotificationError, decode_notification
from kv_transfer.transport import Read, ReadState, Transport, TransportError

_IMPOSTOR = "replaced-"
_IMPOSTOR_NAME = "impostor:"


class FaultPlan:
    """Decides on which occasions to inject a fault, and counts them.

    Several threads call it, but each kind of fault belongs to one thread. The faults of a live cluster can be changed:
    the new set replaces the old one as a whole, and occasions are counted from the start again.
    """

    def __init__(self, options: FaultOptions, counters: TransferCounters) -> None:
        self._counters = counters
        self._odds = _Odds(options)

    @property
    def late_s(self) -> float:
        """By how many seconds late reads and messages are delayed."""
        return self._odds.late_s

    def change(self, options: FaultOptions) -> None:
        """Inject these faults from now on, and no others. From any thread."""
        self._odds = _Odds(options)

    def hits(self, fault: Fault) -> bool:
        """True when ``fault`` is to be injected on this occasion."""
        is_hit = self._odds.hits(fault)
        self._counters.num_injected_faults += is_hit
        return is_hit

    def choose(self, fault: Fault, num_choices: int) -> int:
        """Draw the index of the thing that a fault hits."""
        return self._odds.choose(fault, num_choices)


class _Odds:
    """One set of options, with its random numbers and its counts of occasions."""

    def __init__(self, options: FaultOptions) -> None:
        self.late_s = options.late_s
        self._probabilities = {fault: options.probability(fault) for fault in Fault}
        self._random = {fault: random.Random(f"{options.seed}/{fault}") for fault in Fault}
        self._scheduled = {fault: {entry.nth for entry in options.schedule if entry.fault == fault} for fault in Fault}
        self._num_occasions = dict.fromkeys(Fault, 0)

    def hits(self, fault: Fault) -> bool:
        """Count an occasion, and decide."""
        self._num_occasions[fault] += 1
        is_drawn = self._random[fault].random() < self._probabilities[fault]
        return is_drawn or self._num_occasions[fault] in self._scheduled[fault]

    def choose(self, fault: Fault, num_choices: int) -> int:
        """Draw one of several things."""
        return self._random[fault].randrange(num_choices)


class FailedRead:
    """A read that failed without having written anything."""

    def poll(self) -> ReadState:
        """Failed."""
        return ReadState.FAILED

    def close(self) -> None:
        """Nothing is held."""


class HangingRead:
    """A read that ends only when the transport is closed."""

    def poll(self) -> ReadState:
        """Always active."""
        return ReadState.ACTIVE

    def close(self) -> None:
        """Nothing is held."""


class LateRead:
    """A read that writes nothing before ``due_s``, and ends after it."""

    def __init__(self, start: Callable[[], Read], *, clock: Callable[[], float], due_s: float) -> None:
        self._start = start
        self._clock = clock
        self._due_s = due_s
        self._read: Read | None = None

    def poll(self) -> ReadState:
        """Active until the time has come. Then the real read begins, and its state is returned."""
        if self._read is None:
            if self._clock() < self._due_s:
                return ReadState.ACTIVE
            try:
                self._read = self._start()
            except TransportError:
                self._read = FailedRead()
        return self._read.poll()

    def close(self) -> None:
        """Free the read."""
        if self._read is not None:
            self._read.close()


class FlippingRead:
    """A read that damages one bit of one block when it ends."""

    def __init__(self, read: Read, *, flip: Callable[[], None]) -> None:
        self._read = read
        self._flip = flip
        self._is_flipped = False

    def poll(self) -> ReadState:
        """The read's state; the bit is flipped before anyone learns that the read is done."""
        state = self._read.poll()
        if state is ReadState.DONE and not self._is_flipped:
            self._is_flipped = True
            self._flip()
        return state

    def close(self) -> None:
        """Free the read."""
        self._read.close()


class FaultyTransport:
    """Implements ``Transport`` around another one. It must be polled, because nothing wakes the caller for late
    messages."""

    needs_polling = True

    def __init__(
        self,
        transport: Transport,
        *,
        plan: FaultPlan,
        memory: BlockMemory,
        leases: LeaseTable,
        clock: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._plan = plan
        self._memory = memory
        self._leases = leases
        self._clock = clock
        self._late: list[tuple[float, int, str, bytes]] = []
        self._serial = itertools.count()
        self.has_replaced_peer = False

    @property
    def on_event(self) -> Callable[[], None] | None:
        """The wrapped transport's callback."""
        return self._transport.on_event

    @on_event.setter
    def on_event(self, callback: Callable[[], None] | None) -> None:
        self._transport.on_event = callback

    @property
    def metadata(self) -> bytes:
        """The wrapped transport's."""
        return self._transport.metadata

    def add_peer(self, hello: Hello) -> str:
        """Get ready to talk to a peer. There is no connection to a peer that fault injection made up."""
        incarnation = hello.identity.incarnation
        if incarnation.startswith(_IMPOSTOR):
            return f"{_IMPOSTOR_NAME}{hello.identity.engine_id}/{incarnation}"
        return self._transport.add_peer(hello)

    def remove_peer(self, peer: str) -> None:
        """Forget a peer."""
        if not peer.startswith(_IMPOSTOR_NAME):
            self._transport.remove_peer(peer)

    def start_read(self, peer: str, source_block_ids: Sequence[int], block_ids: Sequence[int]) -> Read:
        """Begin to copy, or begin the faulty read that the plan decides on."""
        self._refuse_impostor(peer)
        plan = self._plan
        if plan.hits(Fault.PEER_REPLACED):
            self.has_replaced_peer = True
            raise TransportError(peer=peer, reason="injected: the peer was replaced")
        if plan.hits(Fault.READ_FAILS):
            return FailedRead()
        if plan.hits(Fault.READ_HANGS):
            return HangingRead()
        read: Read
        if plan.hits(Fault.READ_LATE):
            read = LateRead(
                lambda: self._transport.start_read(peer, source_block_ids, block_ids),
                clock=self._clock,
                due_s=self._clock() + plan.late_s,
            )
        else:
            read = self._transport.start_read(peer, source_block_ids, block_ids)
        if plan.hits(Fault.BIT_FLIPS):
            block_id = block_ids[plan.choose(Fault.BIT_FLIPS, len(block_ids))]
            bit = plan.choose(Fault.BIT_FLIPS, 8 * self._memory.block_bytes)
            return FlippingRead(read, flip=lambda: self._memory.flip_bit(block_id, bit))
        return read

    def send(self, peer: str, message: bytes) -> None:
        """Send a message: once, twice, later, or not at all."""
        self._refuse_impostor(peer)
        plan = self._plan
        if plan.hits(Fault.NOTIFICATION_LOST):
            return
        if plan.hits(Fault.NOTIFICATION_LATE):
            heapq.heappush(self._late, (self._clock() + plan.late_s, next(self._serial), peer, message))
            return
        self._transport.send(peer, message)
        if plan.hits(Fault.NOTIFICATION_TWICE):
            self._transport.send(peer, message)

    def receive(self) -> Sequence[tuple[str, bytes]]:
        """The messages that arrived. A lease may be made to expire just before its "done" is returned."""
        self._send_late()
        messages = self._transport.receive()
        for _, message in messages:
            try:
                notification = decode_notification(message)
            except MalformedNotificationError:
                continue
            if isinstance(notification, Done) and self._plan.hits(Fault.LEASE_EXPIRED):
                self._leases.expire_lease(notification.lease_id)
        return messages

    def close(self) -> None:
        """Close the wrapped transport, which ends hanging reads too."""
        self._late.clear()
        self._transport.close()

    def _send_late(self) -> None:
        while self._late and self._late[0][0] <= self._clock():
            _, _, peer, message = heapq.heappop(self._late)
            try:
                self._transport.send(peer, message)
            except TransportError:  # the caller that sent it returned long ago: the message is lost
                self._plan.hits(Fault.NOTIFICATION_LOST)

    @staticmethod
    def _refuse_impostor(peer: str) -> None:
        if peer.startswith(_IMPOSTOR_NAME):
            raise TransportError(peer=peer, reason="injected: the peer does not exist")


class FaultyRendezvous:
    """Implements ``Rendezvous`` around another one. Called from the threads of handshakes."""

    def __init__(self, rendezvous: Rendezvous, *, plan: FaultPlan, transport: FaultyTransport) -> None:
        self._rendezvous = rendezvous
        self._plan = plan
        self._transport = transport
        self._serial = itertools.count()

    def meet(self, engine_id: str, hello: Hello, *, timeout_s: float) -> Hello:
        """Meet a peer, or be refused, or meet another engine in its place, as the plan decides.

        Raises:
            HandshakeRefusedError: The peer refused us, or the plan did.
        """
        if self._plan.hits(Fault.HANDSHAKE_REFUSED):
            raise HandshakeRefusedError(what="injected fault", ours="none", theirs="handshake_refused")
        answer = self._rendezvous.meet(engine_id, hello, timeout_s=timeout_s)
        if not self._transport.has_replaced_peer:
            return answer
        self._transport.has_replaced_peer = False
        impostor = replace(answer.identity, incarnation=f"{_IMPOSTOR}{next(self._serial)}")
        return replace(answer, identity=impostor)
