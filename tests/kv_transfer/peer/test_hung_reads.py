"""Reads that never end: when a reader reports that only the end of its process can end them."""

from __future__ import annotations

import pytest

from kv_transfer.transport import ReadState
from tests.support.kv.reader_bench import ReaderBench


def wait(bench: ReaderBench, seconds: float) -> None:
    """Let time pass as it does for a thread that looks four times a second."""
    for _ in range(round(seconds * 4)):
        bench.now_s += 0.25
        bench.reader.advance()


@pytest.fixture
def bench() -> ReaderBench:
    """A reader of whose load a read was posted, and does not end."""
    bench = ReaderBench()
    bench.begin("a")
    bench.advance()
    assert bench.reader.reads.has_any
    return bench


@pytest.mark.known_failure(4, 5)
def test_read_that_goes_on_after_its_load_was_given_up_hangs_for_good(bench: ReaderBench) -> None:
    limits = bench.limits
    wait(bench, limits.load_timeout_s + limits.hung_read_timeout_s - 1.0)
    assert bench.stalled == ["a"]
    assert not bench.reader.reads.has_hung

    wait(bench, 1.5)

    assert bench.reader.reads.has_hung
    assert bench.ended == []


def test_read_that_ends_after_all_hangs_no_more(bench: ReaderBench) -> None:
    wait(bench, bench.limits.load_timeout_s + bench.limits.hung_read_timeout_s + 1.0)
    assert bench.reader.reads.has_hung

    for read in bench.transport.reads:
        read.state = ReadState.FAILED
    wait(bench, 1.0)

    assert not bench.reader.reads.has_hung
    assert [ended.request_id for ended in bench.ended] == ["a"]


def test_time_in_which_the_reader_itself_stood_still_does_not_count(bench: ReaderBench) -> None:
    bench.now_s += 10 * (bench.limits.load_timeout_s + bench.limits.hung_read_timeout_s)
    bench.reader.advance()

    assert not bench.reader.reads.has_hung


def test_later_read_that_ends_says_nothing_of_the_one_that_hangs(bench: ReaderBench) -> None:
    """The oldest one counts, whatever is read from others meanwhile."""
    wait(bench, bench.limits.load_timeout_s + bench.limits.hung_read_timeout_s - 1.0)
    bench.reader.reads.look()
    wait(bench, 1.5)

    assert bench.reader.reads.has_hung
