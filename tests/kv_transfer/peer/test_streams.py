"""Streams on the reading side, read by read: what is written where, what is believed, and when it ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_transfer.connector import LoadOrder, StreamOrder
from kv_transfer.params import PROTOCOL_VERSION, KVStreamParams
from kv_transfer.peer.notifications import Announce, Subscribe
from kv_transfer.stream_gate import StreamGate
from kv_transfer.transport import ReadState
from tests.support.kv.reader_bench import PARAMS, SOURCE, ReaderBench

NUM_BLOCKS = 4
PEER = "source/1"


def _stream(bench: ReaderBench, stream_id: str = "stream", request_id: str = "request") -> StreamGate:
    gate = StreamGate()
    order = StreamOrder(
        stream_id=stream_id,
        request_id=request_id,
        params=KVStreamParams(protocol_version=PROTOCOL_VERSION, source=SOURCE, timeout_s=60.0),
        places=tuple(range(NUM_BLOCKS)),
        block_ids=tuple(range(10, 10 + NUM_BLOCKS)),
        gate=gate,
    )
    bench.reader.streams.begin(order)
    bench.finish_handshakes()
    bench.advance()
    return gate


def _announce(bench: ReaderBench, block_ids: tuple[int, ...], *, first_block: int = 0, epoch: int = 1) -> bool:
    places = tuple(range(first_block, first_block + len(block_ids)))
    announce = Announce(request_id="request", epoch=epoch, places=places, block_ids=block_ids)
    was_taken = bench.reader.streams.on_announce(announce, sender=PEER)
    bench.advance()
    return was_taken


def _load(bench: ReaderBench, *, epoch: int = 1, block_ids: tuple[int, ...] = (0, 1, 2, 3)) -> None:
    order = LoadOrder(
        request_id="request",
        params=replace(PARAMS, epoch=epoch, block_ids=(block_ids,)),
        source_block_ids=block_ids,
        block_ids=tuple(range(10, 10 + NUM_BLOCKS)),
        stream_id="stream",
    )
    bench.reader.begin(order)
    bench.advance()


def _reads(bench: ReaderBench) -> list[tuple[int, ...]]:
    return [read.source_block_ids for read in bench.transport.reads]


def test_stream_subscribes_at_its_peer_and_again_before_it_is_forgotten() -> None:
    bench = ReaderBench()
    _stream(bench)
    bench.now_s += bench.limits.renewal_period_s
    bench.advance()

    subscriptions = [message for _, message in bench.transport.sent if isinstance(message, Subscribe)]
    assert subscriptions == [Subscribe(request_id="request")] * 2


def test_load_reads_what_its_stream_has_not_and_waits_for_what_is_under_way() -> None:
    bench = ReaderBench()
    _stream(bench)
    _announce(bench, (0, 1))
    bench.end_reads()
    bench.advance()
    _announce(bench, (2,), first_block=2)

    _load(bench)
    assert _reads(bench) == [(0, 1), (2,), (3,)]
    bench.end_reads()
    bench.advance()
    assert bench.acknowledge()

    (ended,) = bench.ended
    assert (ended.error, ended.failed_block_ids) == (None, ())
    assert bench.counters.num_streamed_blocks == 2


@pytest.mark.parametrize("changes", [{"epoch": 2}, {"block_ids": (4, 5, 6, 7)}])
def test_nothing_is_read_over_a_read_of_another_epoch_or_other_blocks(changes: dict[str, object]) -> None:
    bench = ReaderBench()
    _stream(bench)
    _announce(bench, (0, 1))

    _load(bench, **changes)  # type: ignore[arg-type]
    assert len(_reads(bench)) == 1
    bench.end_reads()
    bench.advance()

    assert [block for read in _reads(bench)[1:] for block in read] == list(changes.get("block_ids", (0, 1, 2, 3)))  # type: ignore[call-overload]
    bench.end_reads()
    bench.advance()
    bench.acknowledge()
    assert bench.ended[0].error is None
    assert bench.counters.num_streamed_blocks == 0


def test_new_epoch_waits_until_the_reads_of_the_old_one_ended() -> None:
    bench = ReaderBench()
    _stream(bench)
    _announce(bench, (0, 1))

    _announce(bench, (6,), epoch=2)
    assert _reads(bench) == [(0, 1)]
    bench.end_reads()
    bench.advance()

    assert _reads(bench) == [(0, 1), (6,)]


@pytest.mark.known_failure(4)
def test_stale_read_that_hangs_stalls_the_load_and_is_waited_for() -> None:
    bench = ReaderBench()
    _stream(bench)
    _announce(bench, (0, 1))
    _load(bench, epoch=2)

    bench.now_s += bench.limits.load_timeout_s
    bench.advance()
    assert bench.stalled == ["request"]
    assert bench.ended == []

    bench.end_reads(ReadState.DONE)
    bench.now_s += 1.0
    bench.advance()
    assert bench.ended[0].failed_block_ids == (10, 11, 12, 13)


def test_failed_early_read_is_read_again_over_a_new_connection_after_a_pause() -> None:
    bench = ReaderBench()
    gate = _stream(bench)
    _announce(bench, (0, 1))
    bench.end_reads(ReadState.FAILED)
    bench.advance()
    assert not gate.close(), "its destination may be written for a moment yet"

    _load(bench)
    bench.finish_handshakes()
    bench.advance()
    assert len(_reads(bench)) == 1
    bench.now_s += 1.0
    bench.advance()
    bench.end_reads()
    bench.advance()
    bench.acknowledge()

    assert [block for read in _reads(bench)[1:] for block in read] == [0, 1, 2, 3]
    assert bench.ended[0].error is None


def test_cancelled_stream_with_a_read_under_way_is_reported_when_that_ended() -> None:
    bench = ReaderBench()
    gate = _stream(bench)
    _announce(bench, (0, 1))

    assert not gate.close()
    _announce(bench, (2,), first_block=2)
    bench.reader.streams.cancel("stream")
    bench.advance()
    assert bench.ended_streams == []
    bench.end_reads()
    bench.advance()

    assert bench.ended_streams == ["stream"]
    assert _reads(bench) == [(0, 1)], "what had not begun never begins"


def test_cancelled_stream_without_a_read_under_way_needs_no_report() -> None:
    bench = ReaderBench()
    gate = _stream(bench)
    _announce(bench, (0, 1))
    bench.end_reads()
    bench.advance()

    assert gate.close()
    _announce(bench, (2,), first_block=2)
    bench.reader.streams.cancel("stream")
    bench.advance()

    assert (_reads(bench), bench.ended_streams) == ([(0, 1)], [])


def test_stream_cancelled_before_the_connector_got_to_it_never_begins() -> None:
    bench = ReaderBench()
    gate = StreamGate()
    gate.close()
    order = StreamOrder(
        stream_id="stream",
        request_id="request",
        params=KVStreamParams(protocol_version=PROTOCOL_VERSION, source=SOURCE, timeout_s=60.0),
        places=(0,),
        block_ids=(10,),
        gate=gate,
    )

    bench.reader.streams.begin(order)

    assert bench.counters.num_streams == 0


def test_closing_ends_streams_and_lets_those_who_wait_know() -> None:
    bench = ReaderBench()
    waited_for, idle = _stream(bench), _stream(bench, "other", "other request")
    _announce(bench, (0, 1))
    assert not waited_for.close()

    bench.reader.give_up()
    bench.reader.end_all()

    assert bench.ended_streams == ["stream"]
    assert idle.close()


@pytest.mark.known_failure(6)
@pytest.mark.parametrize(
    "announce",
    [
        Announce(request_id="request", epoch=0, places=(0,), block_ids=(0,)),
        Announce(request_id="request", epoch=3, places=(0,), block_ids=(64,)),
        Announce(request_id="another", epoch=3, places=(0,), block_ids=(0,)),
    ],
)
def test_announcement_that_cannot_be_true_is_ignored(announce: Announce) -> None:
    """Late, invalid, or without a reader."""
    bench = ReaderBench()
    _stream(bench)
    _announce(bench, (), epoch=2)

    assert not bench.reader.streams.on_announce(announce, sender=PEER)
    assert not bench.reader.streams.on_announce(replace(announce, request_id="request", epoch=9), sender="else/1")
    bench.advance()
    assert _reads(bench) == []


def test_repeated_announcement_is_read_once() -> None:
    bench = ReaderBench()
    _stream(bench)
    _announce(bench, (0, 1))
    _announce(bench, (0, 1, 2))
    bench.end_reads()
    bench.advance()

    assert _reads(bench) == [(0, 1), (2,)]


def test_early_read_waits_while_a_load_has_parts_to_read() -> None:
    """A request waits for the load, but none waits yet for the stream."""
    bench = ReaderBench()
    _stream(bench)
    bench.begin("urgent", num_blocks=6)
    _announce(bench, (0, 1))

    bench.advance(times=1)

    assert (0, 1) in _reads(bench)
    assert [len(read.block_ids) for read in bench.transport.reads[:3]] == [2, 2, 2]
