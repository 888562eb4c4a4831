"""The peers that an engine knows, each with its incarnation, and the handshakes with new ones."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.connector import Rendezvous
from kv_transfer.errors import KVTransferError, PeerUnreachableError
from kv_transfer.params import Hello, PeerIdentity
from kv_transfer.peer.counters import TransferCounters
from kv_transfer.peer.handshake import check_hello
from kv_transfer.transport import Transport, TransportError

logger = logging.getLogger(f"baton.{__name__}")

_FIRST_BACKOFF_S = 1.0
_LAST_BACKOFF_S = 60.0
_JOIN_MARGIN_S = 5.0
MAX_PEERS = 256
"""How many peers are known at a time, since a connection takes memory on both sides. Others are met when needed."""

_MAX_BACKOFFS = 1024
_IDLE_S = 600.0
_IDLE_READER_S = 2 * _IDLE_S
"""How long a reader is kept: longer than it keeps us, or it would wait for answers over a connection that is gone."""


@dataclass(slots=True, kw_only=True, eq=False)
class Peer:
    """A known engine. ``name`` is its name in the transport. Its connection is not removed while reads are in flight.

    ``is_reader``: it began the handshake, and may wait for our answers. ``used_s`` is when it was last used or heard.
    """

    hello: Hello
    name: str
    is_reader: bool
    used_s: float
    num_reads: int = 0
    bytes_in_flight: int = 0

    @property
    def identity(self) -> PeerIdentity:
        """Its engine id and incarnation."""
        return self.hello.identity


@dataclass(slots=True, kw_only=True, eq=False)
class Handshake:
    """A handshake in progress, or its result: ``error`` is None when the peer is in the table."""

    is_finished: bool = False
    error: KVTransferError | None = None


@dataclass(slots=True, kw_only=True)
class _Backoff:
    identity: PeerIdentity | None
    until_s: float
    next_delay_s: float
    error: KVTransferError


class PeerTable:
    """Peers by engine id, one incarnation of each. Owned by the connector's thread; only ``post`` crosses threads.

    Each handshake runs in its own thread, so that a peer that does not answer delays no other; there is at most one
    per engine id. A new incarnation of a known engine replaces the old one only after a successful handshake. After a
    failure the same incarnation is not asked again until a delay has passed: 1 s at first, doubled up to 60 s.

    A peer that stays idle is forgotten after a while. If there are too many, the one that was idle longest is
    forgotten. A forgotten peer is met again when it is needed.
    """

    def __init__(
        self,
        *,
        hello: Hello,
        transport: Transport,
        rendezvous: Rendezvous,
        clock: Callable[[], float],
        handshake_timeout_s: float,
        post: Callable[[Callable[[], None]], bool],
        counters: TransferCounters,
        max_peers: int = MAX_PEERS,
    ) -> None:
        self._max_peers = max_peers
        self._hello = hello
        self._transport = transport
        self._rendezvous = rendezvous
        self._clock = clock
        self._handshake_timeout_s = handshake_timeout_s
        self._post = post
        self._counters = counters
        self._peers: dict[str, Peer] = {}
        self._names: dict[str, Peer] = {}
        self._next_expiry_s = clock() + _IDLE_S
        self._ids: frozenset[str] = frozenset()
        self._leaving: list[Peer] = []
        self._handshakes: dict[str, tuple[Handshake, threading.Thread]] = {}
        self._backoffs: dict[str, _Backoff] = {}
        self._is_closing = False

    @property
    def ids(self) -> frozenset[str]:
        """The engine ids of all known peers. From any thread."""
        return self._ids

    @property
    def has_room(self) -> bool:
        """True when another peer can be met without forgetting a known one. From any thread."""
        return len(self._ids) < self._max_peers

    def greet(self, engine_id: str) -> None:
        """Begin the handshake with any incarnation of an engine, before the first read. From any thread.

        Does nothing when the table is full. Otherwise each greeted peer would push out another one, which would then
        be greeted again.
        """
        if engine_id not in self._ids:
            self._post(functools.partial(self._greet, engine_id))

    def forget(self, engine_id: str) -> None:
        """Forget an engine that is gone for good. From any thread."""
        self._post(functools.partial(self._forget, engine_id))

    def _greet(self, engine_id: str) -> None:
        backoff = self._backoffs.get(engine_id)
        if backoff is not None and self._clock() < backoff.until_s:
            return
        has_room = len(self._peers) + len(self._handshakes) < self._max_peers
        is_new = engine_id not in self._peers and engine_id not in self._handshakes
        if is_new and has_room and not self._is_closing:
            self._begin(engine_id, None)

    def _forget(self, engine_id: str) -> None:
        self._backoffs.pop(engine_id, None)
        peer = self._peers.get(engine_id)
        if peer is not None:
            self.drop(peer)

    def find(self, identity: PeerIdentity) -> Peer | None:
        """The peer, if exactly this incarnation of it is known."""
        peer = self._peers.get(identity.engine_id)
        if peer is None or peer.identity != identity:
            return None
        peer.used_s = self._clock()
        return peer

    def heard(self, name: str) -> Peer | None:
        """Note that a message came from a peer, and return the peer; None when the name is unknown."""
        peer = self._names.get(name)
        if peer is not None:
            peer.used_s = self._clock()
        return peer

    def expire_idle(self) -> None:
        """Forget peers that were idle for long. Most calls return at once: peers are only checked from time to time."""
        now_s = self._clock()
        if now_s < self._next_expiry_s:
            return
        self._next_expiry_s = now_s + _IDLE_S / 4
        for peer in tuple(self._peers.values()):
            if not peer.num_reads and now_s - peer.used_s >= (_IDLE_READER_S if peer.is_reader else _IDLE_S):
                logger.info("idle peer removed: engine_id=%s", peer.identity.engine_id)
                self.drop(peer)

    def meet(self, identity: PeerIdentity) -> Handshake:
        """Begin a handshake, or join the one in progress. During the delay after a failure it fails at once."""
        engine_id = identity.engine_id
        if engine_id in self._handshakes:
            return self._handshakes[engine_id][0]
        if self._is_closing:
            error = PeerUnreachableError(engine_id=engine_id, reason="this connector is closed")
            return Handshake(is_finished=True, error=error)
        backoff = self._backoffs.get(engine_id)
        if backoff is not None and backoff.identity == identity and self._clock() < backoff.until_s:
            return Handshake(is_finished=True, error=backoff.error)
        return self._begin(engine_id, identity)

    def _begin(self, engine_id: str, identity: PeerIdentity | None) -> Handshake:
        handshake = Handshake()
        thread = threading.Thread(
            target=self._meet, args=(handshake, engine_id, identity), name=f"baton-kv-meet-{engine_id}", daemon=True
        )
        self._handshakes[engine_id] = (handshake, thread)
        thread.start()
        return handshake

    def admit(self, hello: Hello, *, is_introduction: bool) -> None:
        """Add a peer to the table after its hello was checked.

        ``is_introduction``: the peer began the handshake. If we already know this incarnation, the peer has lost its
        connection, and ours is replaced too, unless reads are in flight over it.

        Raises:
            TransportError: Its metadata cannot be used; the table stays as it was.
            PeerUnreachableError: Reads over its last connection have not ended yet.
        """
        engine_id = hello.identity.engine_id
        known = self._peers.get(engine_id)
        if known is not None and known.identity == hello.identity:
            if not is_introduction or known.num_reads:
                return
            self.drop(known)
            known = None
        if any(peer.identity == hello.identity for peer in self._leaving):
            raise PeerUnreachableError(engine_id=engine_id, reason="reads over its last connection have not ended yet")
        name = self._add(hello)
        if known is not None:
            logger.info("peer restarted: engine_id=%s incarnation=%s", engine_id, hello.identity.incarnation)
            self.drop(known)
        peer = Peer(hello=hello, name=name, is_reader=is_introduction, used_s=self._clock())
        self._peers[engine_id] = self._names[name] = peer
        self._ids = frozenset(self._peers)
        self._backoffs.pop(engine_id, None)
        self._make_room(besides=peer)
        self._counters.num_handshakes += 1
        logger.info("peer connected: engine_id=%s incarnation=%s", engine_id, hello.identity.incarnation)

    def _add(self, hello: Hello) -> str:
        engine_id = hello.identity.engine_id
        try:
            return self._transport.add_peer(hello)
        except KVTransferError:
            raise
        except Exception as error:  # one peer's bad metadata must not end the thread that serves all peers
            logger.warning("peer not usable: engine_id=%s", engine_id, exc_info=True)
            raise TransportError(peer=engine_id, reason=f"its introduction cannot be used: {error!r}") from error

    def drop(self, peer: Peer) -> None:
        """Forget a peer. Its connection is removed after its last read has ended, since removal stops no read."""
        if self._peers.get(peer.identity.engine_id) is peer:
            del self._peers[peer.identity.engine_id]
            if self._names.get(peer.name) is peer:
                del self._names[peer.name]
            self._ids = frozenset(self._peers)
            self._leaving.append(peer)
            self.sweep()

    def drop_by_name(self, name: str) -> None:
        """Forget the peer of that name; unknown names are ignored."""
        peer = self._names.get(name)
        if peer is not None:
            self.drop(peer)

    def sweep(self) -> None:
        """Remove the connections of dropped peers whose last read ended."""
        for peer in [peer for peer in self._leaving if peer.num_reads == 0]:
            self._leaving.remove(peer)
            self._transport.remove_peer(peer.name)

    def stop_meeting(self) -> None:
        """Begin no handshake from now on: ``close`` would have to wait for its end."""
        self._is_closing = True

    def close(self) -> None:
        """Join the threads of running handshakes; each ends within its timeout."""
        for _, thread in self._handshakes.values():
            thread.join(self._handshake_timeout_s + _JOIN_MARGIN_S)

    def _make_room(self, *, besides: Peer) -> None:
        idle = [peer for peer in self._peers.values() if not peer.num_reads and peer is not besides]
        if len(self._peers) > self._max_peers and idle:
            self.drop(min(idle, key=lambda peer: peer.used_s))

    def _meet(self, handshake: Handshake, engine_id: str, identity: PeerIdentity | None) -> None:
        """Runs in the handshake's thread. Without an identity, any incarnation of the engine is accepted."""
        outcome: Hello | KVTransferError
        try:
            outcome = self._rendezvous.meet(engine_id, self._hello, timeout_s=self._handshake_timeout_s)
            check_hello(ours=self._hello, theirs=outcome)
        except KVTransferError as error:
            outcome = error
        except Exception as error:  # the rendezvous may raise anything, and all of it is a failed handshake
            logger.warning("handshake failed: engine_id=%s", engine_id, exc_info=True)
            outcome = PeerUnreachableError(engine_id=engine_id, reason=repr(error))
        self._post(functools.partial(self._finish, handshake, engine_id, identity, outcome))

    def _finish(
        self, handshake: Handshake, engine_id: str, identity: PeerIdentity | None, outcome: Hello | KVTransferError
    ) -> None:
        _, thread = self._handshakes.pop(engine_id)
        thread.join()
        handshake.is_finished = True
        if isinstance(outcome, Hello):
            try:
                self.admit(outcome, is_introduction=False)
            except KVTransferError as error:
                outcome = error
        if isinstance(outcome, Hello) and identity is not None and outcome.identity != identity:
            outcome = PeerUnreachableError(
                engine_id=engine_id,
                reason=f"incarnation {identity.incarnation} is gone, {outcome.identity.incarnation} answered",
            )
        if isinstance(outcome, KVTransferError):
            self._fail(handshake, engine_id, identity, outcome)
        else:
            self._backoffs.pop(engine_id, None)

    def _fail(
        self, handshake: Handshake, engine_id: str, identity: PeerIdentity | None, error: KVTransferError
    ) -> None:
        handshake.error = error
        self._counters.num_handshakes_failed += 1
        last = self._backoffs.get(engine_id)
        delay_s = last.next_delay_s if last is not None and last.identity == identity else _FIRST_BACKOFF_S
        while len(self._backoffs) >= _MAX_BACKOFFS:
            del self._backoffs[next(iter(self._backoffs))]
        self._backoffs[engine_id] = _Backoff(
            identity=identity,
            until_s=self._clock() + delay_s,
            next_delay_s=min(2 * delay_s, _LAST_BACKOFF_S),
            error=error,
        )
        logger.warning("handshake failed: engine_id=%s retry_s=%.0f error=%s", engine_id, delay_s, error)
