"""The contract of connectors for engines with several KV cache groups, some of them with a window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kv_transfer.cache_groups import ABSENT_BLOCK
from kv_transfer.connector import LeaseEnd
from kv_transfer.params import PeerIdentity
from kv_transfer.protocols import RemoteMatch
from tests.support.engine.kv_engine import KVEngine
from tests.support.kv.kv_world import KVWorld

WINDOWS = (None, 6)
NUM_TOKENS = 22
LENT = ((10, 11, 12, 13, 14, 15), (20, 21))
"""Six blocks of four tokens; the last token, in position 21, sees positions 16 to 21 in the group with a window."""

A = ABSENT_BLOCK


@pytest.fixture(scope="module")
def grouped_source(world: KVWorld) -> Any:
    return world.make_source(world.spec("grouped-source", windows=WINDOWS, checksums=True))


@pytest.fixture(scope="module")
def grouped_reader(world: KVWorld) -> KVEngine:
    return world.make_reader(world.spec("grouped-reader", windows=WINDOWS, checksums=True))


def _lend(world: KVWorld, source: Any, request_id: str) -> Any:
    source.fill((*LENT[0], *LENT[1]), world.seed())
    return source.grant(request_id, LENT, NUM_TOKENS)


def test_blocks_of_each_group_arrive_bit_exact(
    world: KVWorld, grouped_source: Any, grouped_reader: KVEngine, request_id: str
) -> None:
    params = _lend(world, grouped_source, request_id)
    assert [len(checksums) for checksums in params.checksums] == [6, 2]
    assert grouped_reader.match(params, NUM_TOKENS + 1, 0) == RemoteMatch(num_tokens=NUM_TOKENS)

    ended = grouped_reader.load(request_id, params, ((30, 31, 32, 33, 34, 35), (A, A, A, A, 40, 41)))

    assert (ended.error, ended.failed_block_ids) == (None, ())
    assert grouped_reader.content((30, 31, 32, 33, 34, 35)) == grouped_source.content(LENT[0])
    assert grouped_reader.content((40, 41)) == grouped_source.content(LENT[1])
    assert grouped_source.wait_lease(params.lease_id).reason is LeaseEnd.DONE


def test_behind_a_local_prefix_each_group_is_read_from_there_on(
    world: KVWorld, grouped_source: Any, grouped_reader: KVEngine, request_id: str
) -> None:
    params = _lend(world, grouped_source, request_id)
    assert grouped_reader.match(params, NUM_TOKENS + 1, 20) == RemoteMatch(num_tokens=2)

    ended = grouped_reader.load(request_id, params, ((35,), (41,)), first_block=5)

    assert ended.error is None
    assert grouped_reader.content((35, 41)) == grouped_source.content((15, 21))


def test_a_hand_over_without_the_window_of_what_is_known_supplies_nothing(
    world: KVWorld, grouped_source: Any, grouped_reader: KVEngine, request_id: str
) -> None:
    """Twelve tokens are known: the last of them sees blocks that the source gave back long ago."""
    params = _lend(world, grouped_source, request_id)

    assert grouped_reader.match(params, 12, 0).num_tokens == 0
    assert grouped_reader.match(params, NUM_TOKENS, 0).num_tokens == NUM_TOKENS
    grouped_source.abort_lease(request_id)


@pytest.mark.parametrize(
    "changes",
    [
        {"protocol_version": 3},
        {"block_ids": (LENT[0],)},
        {"block_ids": (LENT[0], LENT[1][1:])},
        {"block_ids": (LENT[0][1:], LENT[1])},
        {"checksums": ((1,) * 6, (1,))},
    ],
)
def test_a_hand_over_that_cannot_be_whole_supplies_nothing(
    world: KVWorld, grouped_source: Any, grouped_reader: KVEngine, request_id: str, changes: dict[str, Any]
) -> None:
    params = _lend(world, grouped_source, request_id)

    assert grouped_reader.match(replace(params, **changes), NUM_TOKENS + 1, 0).num_tokens == 0
    grouped_source.abort_lease(request_id)


def test_damage_in_a_group_is_told_by_its_blocks(
    world: KVWorld, grouped_source: Any, grouped_reader: KVEngine, request_id: str
) -> None:
    params = _lend(world, grouped_source, request_id)
    grouped_source.fill((20,), world.seed())

    ended = grouped_reader.load(request_id, params, ((30, 31, 32, 33, 34, 35), (A, A, A, A, 40, 41)))

    assert ended.failed_block_ids == (40,)


def test_stream_brings_of_a_window_what_the_lease_will_cover(
    world: KVWorld, grouped_source: Any, grouped_reader: KVEngine, request_id: str
) -> None:
    grouped_source.fill((*LENT[0], *LENT[1]), world.seed())
    destination = ((30, 31, 32, 33, 34, 35), (A, A, A, A, 40, 41))
    source = PeerIdentity(engine_id=grouped_source.spec.engine_id, incarnation=grouped_source.spec.incarnation)
    before = grouped_reader.stats()
    assert grouped_reader.begin_stream(request_id, source, destination)
    grouped_source.announce(request_id, ((10, 11, 12), (A, A, A)))
    grouped_source.announce(request_id, ((13, 14), (A, 20)), 3)
    grouped_reader.wait_blocks(before.num_blocks + 6)
    params = grouped_source.grant(request_id, LENT, NUM_TOKENS)

    ended = grouped_reader.load(request_id, params, destination, stream_id=request_id)

    assert (ended.error, ended.failed_block_ids) == (None, ())
    assert grouped_reader.stats().num_streamed_blocks - before.num_streamed_blocks == 6
    assert grouped_reader.stats().num_blocks - before.num_blocks == 8
    assert grouped_reader.content((*destination[0], 40, 41)) == grouped_source.content((*LENT[0], *LENT[1]))


def test_chunk_of_which_nothing_will_be_lent_is_not_announced(world: KVWorld, request_id: str) -> None:
    source = world.make_source(world.spec("window-only", windows=(6,)))

    source.announce(request_id, ((A, A),))

    assert source.stats().num_announced_blocks == 0
    params = source.grant(request_id, ((20, 21),), NUM_TOKENS)
    assert params.epoch == 0
