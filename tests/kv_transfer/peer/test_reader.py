"""A load is good only when it was confirmed, and ends only when nothing writes its destination any more."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.params import PeerIdentity
from kv_transfer.peer.notifications import Ack, Release, Renew
from kv_transfer.peer.part_reads import ReaderLimits
from kv_transfer.transport import ReadState
from tests.support.kv.reader_bench import BLOCK_BYTES, SOURCE, ReaderBench


def test_load_is_not_good_before_the_source_confirmed_it() -> None:
    bench = ReaderBench()
    bench.begin()
    bench.advance()
    bench.end_reads()
    bench.advance()
    assert len(bench.dones()) == 1
    assert bench.ended == []

    assert bench.acknowledge()

    assert [ended.failed_block_ids for ended in bench.ended] == [()]
    assert all(read.is_closed for read in bench.transport.reads)


def test_done_is_not_sent_while_a_part_is_in_flight() -> None:
    bench = ReaderBench()
    bench.begin()
    bench.advance()
    assert [read.block_ids for read in bench.transport.reads] == [(0, 1), (2, 3)]

    bench.transport.reads[0].state = ReadState.DONE
    bench.advance()

    assert bench.dones() == []


def test_bytes_in_flight_are_bounded() -> None:
    bench = ReaderBench(
        limits=ReaderLimits(
            load_timeout_s=30.0,
            renewal_period_s=10.0,
            part_bytes=BLOCK_BYTES,
            max_bytes_in_flight_per_peer=3 * BLOCK_BYTES,
        )
    )
    bench.begin("a", num_blocks=4)
    bench.begin("b", num_blocks=4)
    bench.advance(20)
    assert len(bench.transport.reads) == 3

    for _ in range(8):
        bench.end_reads()
        bench.advance(20)

    assert len(bench.transport.reads) == 8
    assert {done.lease_id for done in bench.dones()} == {"lease of a", "lease of b"}


def test_reads_that_hang_keep_no_other_peer_waiting() -> None:
    """Reads may hang for minutes, and on more than one peer."""
    bench = ReaderBench(
        limits=ReaderLimits(
            load_timeout_s=30.0, renewal_period_s=10.0, part_bytes=BLOCK_BYTES, max_bytes_in_flight=2 * BLOCK_BYTES
        )
    )
    bench.begin("hangs", num_blocks=4)
    bench.advance()
    assert len(bench.transport.reads) == 2

    bench.begin("other", num_blocks=2, source=PeerIdentity(engine_id="other", incarnation="1"))
    bench.advance()
    assert [read.block_ids for read in bench.transport.reads[2:]] == [(0,)], "a part at a time of each further peer"
    for _ in range(2):
        bench.transport.reads[-1].state = ReadState.DONE
        bench.advance()

    assert [done.lease_id for done in bench.dones()] == ["lease of other"]


@pytest.mark.known_failure(4)
def test_reads_are_counted_on_the_connection_that_they_go_over() -> None:
    """A connection that was just replaced before a read is not replaced again under that read."""
    bench = ReaderBench()
    bench.introduce(SOURCE)
    bench.begin()
    bench.introduce(SOURCE)
    for _ in range(3):
        bench.advance()
        bench.finish_handshakes()
    peer = bench.peers.find(SOURCE)
    assert peer is not None
    assert peer.bytes_in_flight == 4 * BLOCK_BYTES

    bench.introduce(SOURCE)

    assert bench.peers.find(SOURCE) is peer
    bench.end_reads()
    bench.advance()
    assert bench.acknowledge()
    assert [ended.error for ended in bench.ended] == [None]


@pytest.mark.known_failure(6)
def test_duplicate_and_foreign_acknowledgements_are_ignored() -> None:
    bench = ReaderBench()
    bench.begin()
    bench.advance()
    bench.end_reads()
    bench.advance()
    done = bench.dones()[-1]
    ack = Ack(lease_id=done.lease_id, reader=done.reader, is_alive=True)

    assert not bench.reader.on_ack(replace(ack, reader="someone else"), sender="source/1")
    assert not bench.reader.on_ack(replace(ack, lease_id="another"), sender="source/1")
    assert not bench.reader.on_ack(ack, sender="source/0")
    assert bench.ended == []
    assert bench.reader.on_ack(ack, sender="source/1")
    assert not bench.reader.on_ack(ack, sender="source/1")
    assert len(bench.ended) == 1


@pytest.mark.known_failure(21)
def test_lost_answer_is_asked_for_again_and_then_over_a_new_handshake() -> None:
    """The blocks are not read twice, only the question is repeated."""
    bench = ReaderBench()
    bench.begin()
    bench.advance()
    bench.end_reads()
    bench.advance()
    for _ in range(5):
        bench.now_s += 1.0
        bench.advance()
        bench.finish_handshakes()
        bench.advance()

    assert len(bench.transport.reads) == 2
    assert len({done.reader for done in bench.dones()}) == 1
    assert bench.counters.num_handshakes == 2
    assert bench.acknowledge()
    assert [ended.error for ended in bench.ended] == [None]


@pytest.mark.known_failure(21)
def test_first_broken_read_is_retried_after_a_new_handshake() -> None:
    bench = ReaderBench()
    bench.begin()
    bench.advance()
    bench.end_reads(ReadState.FAILED)
    bench.advance()
    bench.now_s += 1.0
    bench.advance()
    bench.finish_handshakes()
    bench.advance()
    assert bench.ended == []

    bench.end_reads()
    bench.advance()

    assert bench.acknowledge()
    assert [ended.error for ended in bench.ended] == [None]
    assert bench.ended[0].num_bytes == 4 * BLOCK_BYTES


def test_broken_read_from_a_peer_that_is_gone_fails_all_its_blocks() -> None:
    bench = ReaderBench()
    bench.begin()
    bench.advance()
    bench.is_source_gone = True
    bench.end_reads(ReadState.FAILED)
    for _ in range(3):
        bench.now_s += 1.0
        bench.advance()
        bench.finish_handshakes()

    assert [ended.failed_block_ids for ended in bench.ended] == [(0, 1, 2, 3)]
    assert (bench.counters.num_failed_loads, bench.counters.num_failed_blocks) == (1, 4)
    assert bench.transport.peers == []


@pytest.mark.known_failure(4)
def test_failed_load_waits_for_its_other_parts() -> None:
    """One part failed, which says nothing of the other."""
    bench = ReaderBench()
    bench.begin()
    bench.advance()
    bench.is_source_gone = True
    bench.transport.reads[0].state = ReadState.FAILED
    bench.now_s += 1.0
    bench.advance()
    bench.now_s += 1.0
    bench.advance()
    bench.finish_handshakes()
    bench.advance()
    assert bench.ended == []
    assert bench.transport.peers == ["source/1"]

    bench.transport.reads[1].state = ReadState.DONE
    bench.advance()
    bench.finish_handshakes()
    bench.advance()

    assert [ended.failed_block_ids for ended in bench.ended] == [(0, 1, 2, 3)]
    assert bench.transport.peers == []


@pytest.mark.known_failure(4, 14)
def test_hanging_read_is_reported_as_stalled_and_ends_when_it_ends() -> None:
    bench = ReaderBench()
    bench.begin()
    bench.advance()
    bench.now_s += 31.0
    bench.advance()
    assert bench.stalled == ["request"]
    assert bench.ended == []

    bench.now_s += 1000.0
    bench.advance()
    assert bench.stalled == ["request"]
    assert bench.ended == []

    bench.end_reads()
    bench.advance()
    assert [ended.failed_block_ids for ended in bench.ended] == [(0, 1, 2, 3)]
    bench.finish_handshakes()
    bench.advance()
    assert ("source/1", Release(lease_id="lease of request")) in bench.transport.sent


def test_cancelled_load_drains_and_posts_no_further_part() -> None:
    bench = ReaderBench(
        limits=ReaderLimits(
            load_timeout_s=30.0, renewal_period_s=10.0, part_bytes=BLOCK_BYTES, max_bytes_in_flight=BLOCK_BYTES
        )
    )
    bench.begin()
    bench.advance()
    bench.reader.cancel("request")
    bench.advance()
    assert bench.ended == []

    bench.end_reads()
    bench.advance()

    assert len(bench.transport.reads) == 1
    assert [ended.failed_block_ids for ended in bench.ended] == [(0, 1, 2, 3)]
    assert bench.counters.num_cancelled_loads == 1
    assert bench.counters.num_failed_loads == 0


@given(
    ends=st.lists(st.sampled_from([ReadState.ACTIVE, ReadState.DONE, ReadState.FAILED]), min_size=4, max_size=4),
    num_blocks=st.integers(1, 8),
    is_cancelled=st.booleans(),
)
def test_blocks_and_bytes_are_counted_together(ends: list[ReadState], num_blocks: int, is_cancelled: bool) -> None:
    bench = ReaderBench()
    bench.begin(num_blocks=num_blocks)
    bench.advance()
    bench.is_source_gone = True
    for read, state in zip(bench.transport.reads, ends, strict=False):
        read.state = state
    bench.advance()
    if is_cancelled:
        bench.reader.cancel("request")
    for _ in range(6):
        bench.now_s += 10.0
        bench.advance()
        bench.finish_handshakes()
    bench.end_reads()
    for _ in range(4):
        bench.now_s += 1.0
        bench.advance()
        bench.finish_handshakes()

    moved = sum(len(read.block_ids) for read in bench.transport.reads if read.state is ReadState.DONE)
    assert (bench.counters.num_blocks, bench.counters.num_bytes) == (moved, moved * BLOCK_BYTES)
    assert len(bench.ended) == 1


@pytest.mark.known_failure(1)
def test_source_that_denies_the_lease_makes_every_block_invalid() -> None:
    bench = ReaderBench()
    bench.begin()
    bench.advance()
    bench.end_reads()
    bench.advance()

    bench.acknowledge(is_alive=False)

    assert [ended.failed_block_ids for ended in bench.ended] == [(0, 1, 2, 3)]


def test_leases_are_renewed_while_their_loads_are_in_flight_and_not_after() -> None:
    bench = ReaderBench()
    bench.begin("a")
    bench.begin("b")
    bench.advance()
    bench.now_s += 10.0
    bench.advance()
    assert bench.transport.sent == [("source/1", Renew(lease_ids=("lease of a", "lease of b")))]

    bench.reader.cancel("a")
    bench.now_s += 10.0
    bench.advance()

    assert bench.transport.sent[-1] == ("source/1", Renew(lease_ids=("lease of b",)))


def test_after_giving_up_nothing_is_begun() -> None:
    bench = ReaderBench()
    bench.begin("a")
    bench.advance()
    bench.reader.give_up()
    bench.advance()
    assert bench.reader.reads.has_any

    bench.begin("b")
    bench.reader.end_all()

    assert [(ended.request_id, len(ended.failed_block_ids)) for ended in bench.ended] == [("b", 4), ("a", 4)]
