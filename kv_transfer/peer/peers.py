"""Which peers an engine has met, in which life of theirs, and how it meets new ones."""

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
"""So many are known at a time: a connection takes memory on both sides. Those beyond are met when they are needed."""

_MAX_BACKOFFS = 1024
_IDLE_S = 600.0
_IDLE_READER_S = 2 * _IDLE_S
"""A peer that met us is kept longer than it keeps us: it would wait for answers over a connection that is gone."""


@dataclass(slots=True, kw_only=True, eq=False)
class Peer:
    """An engine that was met. ``name`` is the transport's; reads in flight keep its connection from being removed.

    ``is_reader``: it met us, and may be waiting for our answers. ``used_s`` is when it was needed or heard of last.
    """

    hello: Hello
    name: str
    is_reader: bool
    used_s: float
    num_reads: int = 0
    bytes_in_flight: int = 0

    @property
    def identity(self) -> PeerIdentity:
        """Which life of which engine."""
        return self.hello.identity


@dataclass(slots=True, kw_only=True, eq=False)
class Handshake:
    """A meeting under way, or its result: ``error`` is None when the peer is in the table."""

    is_finished: bool = False
    error: KVTransferError | None = None


@dataclass(slots=True, kw_only=True)
class _Backoff:
    identity: PeerIdentity | None
    until_s: float
    next_delay_s: float
    error: KVTransferError


class PeerTable:
    """Peers by engine id, one life of each. Owned by the connector's thread; only ``post`` crosses threads.

    A handshake runs in a thread of its own, so that a peer that does not answer delays nobody else; there is at most
    one per engine id. A new life of a known engine replaces the old one only when it was met successfully. After a
    failure the same life is not asked again before a delay of 1 s, doubled up to 60 s, has passed.

    A peer that is never heard of again is forgotten after a while of idleness, and the one idle longest when there are
    too many: whoever is needed again is met again.
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
        """The engine ids of all that are known now. From any thread."""
        return self._ids

    @property
    def has_room(self) -> bool:
        """Whether another one can be met and nobody forgotten for it. From any thread."""
        return len(self._ids) < self._max_peers

    def greet(self, engine_id: str) -> None:
        """Begin to meet whatever life of an engine there is, before anything is to be read from it. From any thread.

        Where there is no room nothing is done: each that was greeted would have another one forgotten, which is then
        greeted in turn.
        """
        if engine_id not in self._ids:
            self._post(functools.partial(self._greet, engine_id))

    def forget(self, engine_id: str) -> None:
        """An engine is gone for good. From any thread."""
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
        """The peer, if this very life of it was met."""
        peer = self._peers.get(identity.engine_id)
        if peer is None or peer.identity != identity:
            return None
        peer.used_s = self._clock()
        return peer

    def heard(self, name: str) -> Peer | None:
        """A message came from the peer of that name; None when it is unknown."""
        peer = self._names.get(name)
        if peer is not None:
            peer.used_s = self._clock()
        return peer

    def expire_idle(self) -> None:
        """Forget peers that were not needed for long; looks at them every now and then only."""
        now_s = self._clock()
        if now_s < self._next_expiry_s:
            return
        self._next_expiry_s = now_s + _IDLE_S / 4
        for peer in tuple(self._peers.values()):
            if not peer.num_reads and now_s - peer.used_s >= (_IDLE_READER_S if peer.is_reader else _IDLE_S):
                logger.info("idle peer forgotten: engine_id=%s", peer.identity.engine_id)
                self.drop(peer)

    def meet(self, identity: PeerIdentity) -> Handshake:
        """Begin to meet a peer, or join the handshake under way; finished at once while it must not be asked."""
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
        """Take a peer whose hello was checked into the table.

        ``is_introduction``: the peer came to us. If we know this life of it already then its connection broke, and
        ours to it is made anew.

        Raises:
            TransportError: Its metadata cannot be used; what was known before stays.
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
        logger.info("peer met: engine_id=%s incarnation=%s", engine_id, hello.identity.incarnation)

    def _add(self, hello: Hello) -> str:
        engine_id = hello.identity.engine_id
        try:
            return self._transport.add_peer(hello)
        except KVTransferError:
            raise
        except Exception as error:  # whatever a peer says must not end the thread that serves all others
            logger.warning("peer not usable: engine_id=%s", engine_id, exc_info=True)
            raise TransportError(peer=engine_id, reason=f"its introduction cannot be used: {error!r}") from error

    def drop(self, peer: Peer) -> None:
        """Forget a peer; its connection goes when its last read has ended, since removing it stops no read."""
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
        """Begin no handshake from now on: whoever closes would have to wait for its end."""
        self._is_closing = True

    def close(self) -> None:
        """Join the handshakes under way; each ends within its timeout."""
        for _, thread in self._handshakes.values():
            thread.join(self._handshake_timeout_s + _JOIN_MARGIN_S)

    def _make_room(self, *, besides: Peer) -> None:
        idle = [peer for peer in self._peers.values() if not peer.num_reads and peer is not besides]
        if len(self._peers) > self._max_peers and idle:
            self.drop(min(idle, key=lambda peer: peer.used_s))

    def _meet(self, handshake: Handshake, engine_id: str, identity: PeerIdentity | None) -> None:
        """Runs in the handshake's thread. Without an identity any life of the engine will do."""
        outcome: Hello | KVTransferError
        try:
            outcome = self._rendezvous.meet(engine_id, self._hello, timeout_s=self._handshake_timeout_s)
            check_hello(ours=self._hello, theirs=outcome)
        except KVTransferError as error:
            outcome = error
        except Exception as error:  # the rendezvous is not ours: whatever it raises is a handshake that failed
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
