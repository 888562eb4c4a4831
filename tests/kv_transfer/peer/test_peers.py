"""Peers are connected once per incarnation; a new incarnation replaces the old one only once it is connected."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_transfer.errors import HandshakeRefusedError, KVTransferError, PeerUnreachableError
from kv_transfer.layout import KVRegion, MemoryKind
from kv_transfer.params import Hello, PeerIdentity
from kv_transfer.peer.counters import TransferCounters
from kv_transfer.peer.handshake import build_hello
from kv_transfer.peer.peers import MAX_PEERS, Handshake, PeerTable
from kv_transfer.transport import TransportError
from tests.support.engine.kv_engine import KVEngineSpec
from tests.support.kv.scripted_transport import ScriptedTransport

LAYOUT = KVEngineSpec(engine_id="any").layout
FIRST, SECOND = (PeerIdentity(engine_id="source", incarnation=incarnation) for incarnation in "12")


def _hello(identity: PeerIdentity) -> Hello:
    region = KVRegion(
        base_address=0, num_blocks=8, block_bytes=LAYOUT.block_bytes, memory=MemoryKind.DRAM, device_index=0
    )
    return build_hello(identity=identity, layout=LAYOUT, region=region, agent_metadata=b"")


class PickyTransport(ScriptedTransport):
    """A transport that cannot use some peers' metadata."""

    def __init__(self) -> None:
        super().__init__()
        self.is_picky = False
        self.choke: Exception | None = None

    def add_peer(self, hello: Hello) -> str:
        """Take a peer, or not."""
        if self.choke is not None:
            raise self.choke
        if self.is_picky:
            raise TransportError(peer=hello.identity.engine_id, reason="metadata of another version")
        return super().add_peer(hello)


class Bench:
    """A peer table whose rendezvous answers with ``answer``."""

    def __init__(self, *, max_peers: int = MAX_PEERS) -> None:
        self.now_s = 0.0
        self.answer: Hello | Exception = _hello(FIRST)
        self.num_asked = 0
        self.transport = PickyTransport()
        self.counters = TransferCounters()
        self._posted: list[object] = []
        self.table = PeerTable(
            hello=_hello(PeerIdentity(engine_id="reader", incarnation="1")),
            transport=self.transport,
            rendezvous=self,
            clock=lambda: self.now_s,
            handshake_timeout_s=5.0,
            post=self._post,
            counters=self.counters,
            max_peers=max_peers,
        )

    def meet(self, engine_id: str, hello: Hello, *, timeout_s: float) -> Hello:
        self.num_asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def _post(self, command: object) -> bool:
        self._posted.append(command)
        return True

    def run_posted(self) -> None:
        """Run what the connector's thread would do, until nothing is pending."""
        self.table.close()
        while self._posted:
            command = self._posted.pop(0)
            assert callable(command)
            command()
            self.table.close()

    def meet_and_wait(self, identity: PeerIdentity) -> Handshake:
        handshake = self.table.meet(identity)
        self.run_posted()
        assert handshake.is_finished
        return handshake


@pytest.mark.known_failure(12)
def test_new_life_replaces_the_old_one() -> None:
    bench = Bench()
    bench.meet_and_wait(FIRST)
    bench.answer = _hello(SECOND)

    assert bench.meet_and_wait(SECOND).error is None

    assert bench.table.find(FIRST) is None
    assert bench.table.find(SECOND) is not None
    assert bench.transport.peers == ["source/2"]


@pytest.mark.known_failure(12)
def test_old_life_stays_when_the_new_one_cannot_be_used() -> None:
    """A bad handshake must not cost the peer that works."""
    bench = Bench()
    bench.meet_and_wait(FIRST)
    bench.answer = _hello(SECOND)
    bench.transport.is_picky = True

    assert isinstance(bench.meet_and_wait(SECOND).error, TransportError)
    with pytest.raises(TransportError):
        bench.table.admit(_hello(SECOND), is_introduction=True)

    assert bench.table.find(FIRST) is not None
    assert bench.transport.peers == ["source/1"]


def test_life_that_is_gone_is_told_from_the_one_that_answers() -> None:
    bench = Bench()
    bench.answer = _hello(SECOND)

    error = bench.meet_and_wait(FIRST).error

    assert "incarnation 1 is gone, 2 answered" in str(error)
    assert bench.table.find(SECOND) is not None


def test_failing_peer_is_asked_after_growing_delays() -> None:
    bench = Bench()
    bench.answer = PeerUnreachableError(engine_id="source", reason="it is down")
    asked_at = []
    for second in range(200):
        bench.now_s = float(second)
        num_asked = bench.num_asked
        assert bench.meet_and_wait(FIRST).error is not None
        if bench.num_asked > num_asked:
            asked_at.append(second)

    assert asked_at == [0, 1, 3, 7, 15, 31, 63, 123, 183]


def test_peer_that_came_to_us_is_asked_at_once_when_its_connection_broke() -> None:
    """It is there: what failed before says nothing any more."""
    bench = Bench()
    bench.answer = PeerUnreachableError(engine_id="source", reason="it is starting")
    bench.meet_and_wait(FIRST)
    bench.table.admit(_hello(FIRST), is_introduction=True)
    peer = bench.table.find(FIRST)
    assert peer is not None
    bench.table.drop(peer)
    bench.answer = _hello(FIRST)

    assert bench.meet_and_wait(FIRST).error is None


def test_another_life_is_asked_at_once_after_a_failure() -> None:
    bench = Bench()
    bench.answer = PeerUnreachableError(engine_id="source", reason="it is down")
    bench.meet_and_wait(FIRST)
    bench.answer = _hello(SECOND)

    assert bench.meet_and_wait(SECOND).error is None


def test_whatever_a_rendezvous_raises_is_a_failed_handshake() -> None:
    bench = Bench()
    bench.answer = RuntimeError("the actor is in a bad mood")

    error = bench.meet_and_wait(FIRST).error

    assert isinstance(error, KVTransferError)
    assert "bad mood" in str(error)


def test_concurrent_meetings_share_one_handshake() -> None:
    bench = Bench()

    handshakes = [bench.table.meet(FIRST) for _ in range(3)]
    bench.meet_and_wait(FIRST)

    assert len({id(handshake) for handshake in handshakes}) == 1
    assert bench.num_asked == 1


def test_peer_that_introduces_itself_again_gets_a_new_connection() -> None:
    bench = Bench()
    bench.table.admit(_hello(FIRST), is_introduction=True)
    first = bench.table.find(FIRST)

    bench.table.admit(_hello(FIRST), is_introduction=True)

    assert bench.table.find(FIRST) is not first
    assert bench.transport.peers == ["source/1"]


@pytest.mark.known_failure(4)
def test_connection_with_reads_in_flight_is_neither_remade_nor_removed() -> None:
    """Whoever forgets a connection forgets when its reads end."""
    bench = Bench()
    bench.table.admit(_hello(FIRST), is_introduction=True)
    peer = bench.table.find(FIRST)
    assert peer is not None
    peer.num_reads = 1
    bench.table.admit(_hello(FIRST), is_introduction=True)
    assert bench.table.find(FIRST) is peer

    bench.table.drop(peer)
    assert bench.transport.peers == ["source/1"]
    with pytest.raises(PeerUnreachableError, match="have not ended"):
        bench.table.admit(_hello(FIRST), is_introduction=True)

    peer.num_reads = 0
    bench.table.sweep()
    assert bench.transport.peers == []


def test_hello_with_other_block_bytes_is_refused() -> None:
    bench = Bench()
    bench.answer = replace(_hello(FIRST), block_bytes=1)

    assert "bytes of a block" in str(bench.meet_and_wait(FIRST).error)


@pytest.mark.parametrize(
    "changes",
    [
        {"base_address": -1},
        {"base_address": 1 << 64},
        {"base_address": (1 << 64) - LAYOUT.block_bytes},
        {"num_blocks": 0},
        {"num_blocks": 1 << 31},
        {"device_index": -1},
        {"device_index": 1 << 32},
    ],
)
def test_hello_of_memory_that_cannot_be_is_refused_before_a_transport_sees_it(changes: dict[str, int]) -> None:
    bench = Bench()
    bench.answer = replace(_hello(FIRST), **changes)  # type: ignore[arg-type]

    error = bench.meet_and_wait(FIRST).error

    assert isinstance(error, HandshakeRefusedError)
    assert str(*changes.values()) in str(error)
    assert bench.transport.peers == []


def test_transport_that_chokes_on_a_peer_fails_that_handshake_and_no_more() -> None:
    """Whatever a peer says must not end the thread that serves all others."""
    bench = Bench()
    bench.transport.choke = OverflowError("Python integer out of bounds for uint64")

    assert "out of bounds" in str(bench.meet_and_wait(FIRST).error)
    with pytest.raises(TransportError, match="out of bounds"):
        bench.table.admit(_hello(FIRST), is_introduction=True)
    bench.transport.choke = None
    assert bench.meet_and_wait(SECOND).error is not None
    bench.answer = _hello(SECOND)
    bench.now_s += 1.0
    assert bench.meet_and_wait(SECOND).error is None


def test_peers_that_are_not_heard_of_again_are_forgotten() -> None:
    """A peer that is gone for good leaves nothing behind; one that is needed stays, and one that returns is connected
    again.
    """
    bench = Bench()
    readers = [PeerIdentity(engine_id=f"reader-{number}", incarnation="1") for number in range(2)]
    for reader in readers:
        bench.table.admit(_hello(reader), is_introduction=True)
    bench.meet_and_wait(FIRST)
    for _ in range(9):
        bench.now_s += 150.0
        bench.table.heard("reader-0/1")
        bench.table.expire_idle()

    assert bench.transport.peers == ["reader-0/1"]
    assert bench.table.find(readers[0]) is not None
    assert bench.table.find(FIRST) is None
    assert bench.meet_and_wait(FIRST).error is None


def test_a_peer_outlasts_its_readers_idea_of_idleness() -> None:
    """Else a reader would wait for an answer that cannot be sent to it."""
    bench = Bench()
    bench.table.admit(_hello(SECOND), is_introduction=True)
    bench.now_s = 1199.0
    bench.table.expire_idle()

    assert bench.table.find(SECOND) is not None


def test_the_number_of_peers_is_bounded_and_the_one_idle_longest_goes() -> None:
    bench = Bench()
    peers = [PeerIdentity(engine_id=f"peer-{number}", incarnation="1") for number in range(300)]
    for peer in peers:
        bench.now_s += 0.1
        bench.table.admit(_hello(peer), is_introduction=True)
        bench.table.heard("peer-0/1")

    assert bench.table.find(peers[0]) is not None
    assert len([peer for peer in peers if bench.table.find(peer) is not None]) == 256
    assert bench.table.find(peers[44]) is None
    assert bench.table.find(peers[45]) is not None


def test_whoever_is_greeted_has_nobody_forgotten() -> None:
    bench = Bench(max_peers=2)
    peers = [PeerIdentity(engine_id=f"peer-{number}", incarnation="1") for number in range(3)]
    for peer in peers[:2]:
        assert bench.table.has_room
        bench.table.admit(_hello(peer), is_introduction=True)
    assert not bench.table.has_room

    bench.table.greet(FIRST.engine_id)
    bench.run_posted()
    assert bench.num_asked == 0
    assert bench.table.ids == {"peer-0", "peer-1"}

    bench.meet_and_wait(FIRST)
    assert FIRST.engine_id in bench.table.ids, "it is needed now, whoever goes for it"
    assert len(bench.table.ids) == 2


def test_delays_of_peers_that_are_gone_are_bounded() -> None:
    bench = Bench()
    bench.answer = PeerUnreachableError(engine_id="gone", reason="dead")
    for number in range(1100):
        bench.meet_and_wait(PeerIdentity(engine_id=f"gone-{number}", incarnation="1"))

    assert len(bench.table._backoffs) == 1024


def test_engine_can_be_met_before_anything_is_read_from_it() -> None:
    bench = Bench()
    bench.table.greet(FIRST.engine_id)
    bench.run_posted()
    assert bench.table.ids == {FIRST.engine_id}
    assert bench.table.find(FIRST) is not None

    bench.table.greet(FIRST.engine_id)
    bench.run_posted()
    assert bench.num_asked == 1

    bench.table.forget(FIRST.engine_id)
    bench.run_posted()
    assert bench.table.ids == frozenset()


def test_greeting_that_failed_waits_before_it_is_tried_again() -> None:
    bench = Bench()
    bench.answer = PeerUnreachableError(engine_id=FIRST.engine_id, reason="nobody is there")
    for _ in range(3):
        bench.table.greet(FIRST.engine_id)
        bench.run_posted()
    assert bench.num_asked == 1

    bench.answer = _hello(FIRST)
    bench.now_s += 1.0
    bench.table.greet(FIRST.engine_id)
    bench.run_posted()
    assert bench.table.ids == {FIRST.engine_id}
