"""Sources that fall silent while they are read from, by the clock of a test."""

from __future__ import annotations

from kv_transfer.peer.part_reads import ReaderLimits
from kv_transfer.transport import ReadState
from tests.support.kv.reader_bench import BLOCK_BYTES, ReaderBench


def wait(bench: ReaderBench, seconds: float) -> None:
    """Let time pass as it does for a thread that looks ten times a second."""
    for _ in range(round(seconds * 10)):
        bench.now_s += 0.1
        bench.reader.advance()


def test_source_that_falls_silent_is_not_waited_for() -> None:
    """A process that stands still answers neither "done" nor a handshake; what was read may no longer have held."""
    bench = ReaderBench()
    bench.begin()
    bench.advance()
    bench.end_reads()
    wait(bench, bench.limits.answer_timeout_s - 0.5)
    assert bench.ended == []

    wait(bench, 1.0)

    assert [ended.failed_block_ids for ended in bench.ended] == [(0, 1, 2, 3)]
    assert bench.ended[0].error == "source was silent for 5 s"


def test_first_meeting_has_a_bound_of_its_own() -> None:
    """A handshake goes over Ray and ends by its own timeout; the source is silent from when it is read from."""
    bench = ReaderBench()
    bench.begin(meets=False)
    wait(bench, bench.limits.answer_timeout_s + 4.0)
    assert bench.ended == []

    bench.finish_handshakes()
    bench.advance()
    bench.end_reads()
    wait(bench, 1.5)
    assert bench.acknowledge()

    assert [ended.error for ended in bench.ended] == [None]


def test_source_that_fell_silent_is_not_waited_for_when_it_is_to_be_met_again() -> None:
    bench = ReaderBench()
    bench.begin()
    bench.advance()
    bench.end_reads(ReadState.FAILED)
    bench.advance()
    wait(bench, bench.limits.answer_timeout_s - 0.5)
    assert bench.ended == []

    wait(bench, 1.0)

    assert bench.ended[0].error == "source was silent for 5 s"


def test_load_that_begins_right_after_a_silence_has_the_whole_time_to_itself() -> None:
    """The source may have gone on, and be about to say so."""
    limits = ReaderLimits(load_timeout_s=30.0, renewal_period_s=10.0, part_bytes=2 * BLOCK_BYTES, done_retry_s=10.0)
    bench = ReaderBench(limits=limits)
    bench.begin("first")
    bench.advance()
    bench.end_reads()
    while not bench.ended:
        wait(bench, 0.1)

    bench.begin("second")
    bench.advance()
    bench.end_reads()
    bench.advance()
    assert bench.acknowledge()

    assert [ended.error for ended in bench.ended] == ["source was silent for 5 s", None]


def test_source_that_says_anything_is_not_silent() -> None:
    bench = ReaderBench()
    bench.begin()
    bench.begin("other")
    bench.advance()
    bench.end_reads()
    wait(bench, 2.5)
    peer = bench.peers.heard("source/1")
    assert peer is not None

    bench.reader.heard(peer)
    wait(bench, 2.4)
    bench.finish_handshakes()
    wait(bench, 2.4)

    assert bench.ended == []


def test_time_in_which_we_were_stopped_is_not_its_silence() -> None:
    """The answer came meanwhile, and is read after the first look."""
    bench = ReaderBench()
    bench.begin()
    bench.advance()
    bench.end_reads()
    bench.advance()

    bench.now_s += bench.limits.answer_timeout_s * 4
    bench.reader.advance()

    assert bench.acknowledge()
    assert [ended.error for ended in bench.ended] == [None]


def test_read_that_makes_no_progress_is_not_waited_for() -> None:
    """It may end yet, so that its destination stays held; the request does not wait for that."""
    bench = ReaderBench()
    bench.begin()
    wait(bench, bench.limits.answer_timeout_s - 0.5)
    bench.transport.reads[0].state = ReadState.DONE
    wait(bench, bench.limits.answer_timeout_s - 0.5)
    assert bench.stalled == []

    wait(bench, 1.0)

    assert bench.stalled == ["request"]
    assert bench.ended == []
    bench.end_reads()
    bench.advance()
    assert [ended.failed_block_ids for ended in bench.ended] == [(0, 1, 2, 3)]


def test_large_reads_may_take_longer() -> None:
    """Over a slow network nothing is received of a read before it is complete."""
    limits = ReaderLimits(load_timeout_s=30.0, renewal_period_s=10.0, slowest_bytes_per_s=BLOCK_BYTES)
    bench = ReaderBench(limits=limits)
    bench.begin(num_blocks=4)
    wait(bench, limits.answer_timeout_s + 3.0)
    assert bench.stalled == []

    bench.end_reads()
    bench.advance()

    assert bench.acknowledge()
    assert [ended.error for ended in bench.ended] == [None]
