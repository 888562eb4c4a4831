"""The contract of streamed hand-overs: blocks may arrive early, and count only once their lease confirms them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kv_transfer.params import PeerIdentity
from kv_transfer.stats import TransferStats
from tests.support.engine.kv_engine import KVEngine
from tests.support.kv.kv_world import KVWorld

SOURCE_BLOCKS = (9, 3, 40, 12, 13, 20)
BLOCKS = (1, 60, 7, 8, 2, 33)


def _identity(source: Any) -> PeerIdentity:
    return PeerIdentity(engine_id=source.spec.engine_id, incarnation=source.spec.incarnation)


def _num_new(reader: KVEngine, before: TransferStats, name: str) -> int:
    return int(getattr(reader.stats(), name) - getattr(before, name))


def _read_early(reader: KVEngine, source: Any, request_id: str, announced: tuple[int, ...]) -> None:
    """Stream, and wait until all that is announced is here."""
    num_blocks = reader.stats().num_blocks
    source.announce(request_id, announced)
    assert reader.begin_stream(request_id, _identity(source), BLOCKS)
    reader.wait_blocks(num_blocks + len(announced))


def test_what_was_read_early_is_not_read_again(world: KVWorld, source: Any, reader: KVEngine, request_id: str) -> None:
    source.fill(SOURCE_BLOCKS, world.seed())
    _read_early(reader, source, request_id, SOURCE_BLOCKS[:4])
    before = reader.stats()
    params = source.grant(request_id, SOURCE_BLOCKS)

    ended = reader.load(request_id, params, BLOCKS, stream_id=request_id)

    assert (ended.error, ended.failed_block_ids) == (None, ())
    assert reader.content(BLOCKS) == source.content(SOURCE_BLOCKS)
    assert _num_new(reader, before, "num_blocks") == 2
    assert _num_new(reader, before, "num_streamed_blocks") == 4
    assert ended.num_bytes == len(BLOCKS) * reader.spec.layout.block_bytes


def test_blocks_are_read_as_they_are_announced(world: KVWorld, source: Any, reader: KVEngine, request_id: str) -> None:
    """The reader may come first: what is announced later reaches it."""
    source.fill(SOURCE_BLOCKS, world.seed())
    assert reader.begin_stream(request_id, _identity(source), BLOCKS)
    num_blocks = reader.stats().num_blocks
    for number in range(3):
        source.announce(request_id, SOURCE_BLOCKS[2 * number : 2 * number + 2], 2 * number)
        reader.wait_blocks(num_blocks + 2 * number + 2)
    before = reader.stats()

    ended = reader.load(request_id, source.grant(request_id, SOURCE_BLOCKS), BLOCKS, stream_id=request_id)

    assert ended.error is None
    assert reader.content(BLOCKS) == source.content(SOURCE_BLOCKS)
    assert _num_new(reader, before, "num_blocks") == 0


def test_only_the_blocks_with_a_destination_are_read(
    world: KVWorld, source: Any, reader: KVEngine, request_id: str
) -> None:
    """Decode holds the first two blocks of the prompt already."""
    source.fill(SOURCE_BLOCKS, world.seed())
    reader.fill((1, 60), world.seed())
    untouched = reader.content((1, 60))
    source.announce(request_id, SOURCE_BLOCKS)
    num_blocks = reader.stats().num_blocks
    assert reader.begin_stream(request_id, _identity(source), BLOCKS[2:], 2)
    reader.wait_blocks(num_blocks + 4)

    params = source.grant(request_id, SOURCE_BLOCKS)
    ended = reader.load(request_id, params, BLOCKS[2:], 2, stream_id=request_id)

    assert ended.error is None
    assert reader.content(BLOCKS[2:]) == source.content(SOURCE_BLOCKS[2:])
    assert reader.content((1, 60)) == untouched


@pytest.mark.parametrize("checksums", [True, False])
def test_what_a_withdrawn_announcement_brought_is_read_again(world: KVWorld, request_id: str, checksums: bool) -> None:
    """The prefill was preempted and its blocks were used for something else; it gets the same ones again."""
    source = world.make_source(world.spec("preempted", checksums=checksums))
    reader = world.make_reader(world.spec("early", checksums=checksums))
    source.fill(SOURCE_BLOCKS, world.seed())
    _read_early(reader, source, request_id, SOURCE_BLOCKS[:4])

    source.withdraw(request_id)
    source.fill(SOURCE_BLOCKS, world.seed())
    source.announce(request_id, SOURCE_BLOCKS[:1])
    reader.wait_blocks(5)
    ended = reader.load(request_id, source.grant(request_id, SOURCE_BLOCKS), BLOCKS, stream_id=request_id)

    assert ended.error is None
    assert reader.content(BLOCKS) == source.content(SOURCE_BLOCKS)
    assert reader.stats().num_streamed_blocks == 1


@pytest.mark.parametrize("checksums", [True, False])
def test_prompt_computed_anew_without_announcements_is_read_whole(
    world: KVWorld, request_id: str, checksums: bool
) -> None:
    source = world.make_source(world.spec("preempted", checksums=checksums))
    reader = world.make_reader(world.spec("early", checksums=checksums))
    source.fill(SOURCE_BLOCKS, world.seed())
    _read_early(reader, source, request_id, SOURCE_BLOCKS[:4])

    source.withdraw(request_id)
    source.fill(SOURCE_BLOCKS, world.seed())
    ended = reader.load(request_id, source.grant(request_id, SOURCE_BLOCKS), BLOCKS, stream_id=request_id)

    assert ended.error is None
    assert reader.content(BLOCKS) == source.content(SOURCE_BLOCKS)
    assert reader.stats().num_streamed_blocks == 0


def test_prompt_prefilled_elsewhere_is_read_whole(
    world: KVWorld, source: Any, reader: KVEngine, request_id: str
) -> None:
    source.fill(SOURCE_BLOCKS, world.seed())
    _read_early(reader, source, request_id, SOURCE_BLOCKS[:4])
    other = world.make_source(world.spec("other"))
    other.fill(SOURCE_BLOCKS, world.seed())
    other.announce(request_id, SOURCE_BLOCKS[:4])

    ended = reader.load(request_id, other.grant(request_id, SOURCE_BLOCKS), BLOCKS, stream_id=request_id)

    assert ended.error is None
    assert reader.content(BLOCKS) == other.content(SOURCE_BLOCKS)
    source.withdraw(request_id)


@pytest.mark.known_failure(1)
def test_nothing_read_early_is_good_under_an_expired_lease(
    world: KVWorld, source: Any, reader: KVEngine, request_id: str
) -> None:
    source.fill(SOURCE_BLOCKS, world.seed())
    _read_early(reader, source, request_id, SOURCE_BLOCKS)
    num_streamed = reader.stats().num_streamed_blocks
    params = source.grant(request_id, SOURCE_BLOCKS)
    source.abort_lease(request_id)

    ended = reader.load(request_id, params, BLOCKS, stream_id=request_id)

    assert ended.failed_block_ids == BLOCKS
    assert reader.stats().num_streamed_blocks == num_streamed


@pytest.mark.known_failure(4)
def test_cancelled_stream_writes_nothing_any_more(
    world: KVWorld, source: Any, reader: KVEngine, request_id: str
) -> None:
    """Its blocks belong to someone else as soon as the cancellation is confirmed."""
    source.fill(SOURCE_BLOCKS, world.seed())
    _read_early(reader, source, request_id, SOURCE_BLOCKS[:2])
    if not reader.cancel_stream(request_id):
        reader.wait_stream(request_id)
    reader.fill(BLOCKS, world.seed())
    content = reader.content(BLOCKS)

    source.announce(request_id, SOURCE_BLOCKS[2:], 2)
    after = world.unique("request")
    assert reader.load(after, source.grant(after, (50,)), (50,)).error is None

    assert reader.content(BLOCKS) == content
    source.withdraw(request_id)


def test_stream_from_a_peer_that_cannot_be_met_leaves_the_load_alone(
    world: KVWorld, source: Any, reader: KVEngine, request_id: str
) -> None:
    nobody = PeerIdentity(engine_id=world.unique("nobody"), incarnation="1")
    source.fill(SOURCE_BLOCKS, world.seed())

    assert reader.begin_stream(request_id, nobody, BLOCKS)
    ended = reader.load(request_id, source.grant(request_id, SOURCE_BLOCKS), BLOCKS, stream_id=request_id)

    assert ended.error is None
    assert reader.content(BLOCKS) == source.content(SOURCE_BLOCKS)


def test_without_the_ability_nothing_is_streamed(world: KVWorld, request_id: str) -> None:
    source = world.make_source(world.spec("plain", streamed=False))
    reader = world.make_reader(world.spec("reader"))
    plain_reader = world.make_reader(replace(world.spec("plain-reader"), streamed=False))
    source.fill(SOURCE_BLOCKS, world.seed())
    source.announce(request_id, SOURCE_BLOCKS[:4])

    assert not plain_reader.begin_stream(request_id, _identity(source), BLOCKS)
    assert reader.begin_stream(request_id, _identity(source), BLOCKS)
    params = source.grant(request_id, SOURCE_BLOCKS)
    ended = reader.load(request_id, params, BLOCKS, stream_id=request_id)

    assert params.epoch == 0
    assert ended.error is None
    assert reader.stats().num_streamed_blocks == 0
