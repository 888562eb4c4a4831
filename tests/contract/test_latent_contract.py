"""The contract of connectors for engines that cache latents: one part per layer."""

from __future__ import annotations

from typing import Any

import pytest

from kv_transfer.cache_groups import ABSENT_BLOCK
from kv_transfer.connector import LeaseEnd
from kv_transfer.layout import KEYS_AND_VALUES, LATENTS
from kv_transfer.protocols import RemoteMatch
from tests.support.engine.kv_engine import KVEngine
from tests.support.kv.kv_world import KVWorld

NUM_TOKENS = 22
SHAPE = {"num_parts": LATENTS, "head_dim": 72, "windows": (None, 6), "checksums": True}
LENT = ((10, 11, 12, 13, 14, 15), (20, 21))
"""Six blocks of four tokens, and of the group with a window the last two."""

A = ABSENT_BLOCK
DESTINATION = ((30, 31, 32, 33, 34, 35), (A, A, A, A, 40, 41))


@pytest.fixture(scope="module")
def latent_source(world: KVWorld) -> Any:
    return world.make_source(world.spec("latent-source", **SHAPE))


@pytest.fixture(scope="module")
def latent_reader(world: KVWorld) -> KVEngine:
    return world.make_reader(world.spec("latent-reader", **SHAPE))


def test_latents_arrive_bit_exact(world: KVWorld, latent_source: Any, latent_reader: KVEngine, request_id: str) -> None:
    latent_source.fill((*LENT[0], *LENT[1]), world.seed())
    params = latent_source.grant(request_id, LENT, NUM_TOKENS)
    assert [len(checksums) for checksums in params.checksums] == [6, 2]
    assert latent_reader.match(params, NUM_TOKENS + 1, 0) == RemoteMatch(num_tokens=NUM_TOKENS)

    ended = latent_reader.load(request_id, params, DESTINATION)

    assert (ended.error, ended.failed_block_ids) == (None, ())
    assert ended.num_bytes == 8 * 2 * 4 * 72 * 4, "eight blocks of two layers, four tokens, 72 numbers of four bytes"
    assert latent_reader.content(DESTINATION[0]) == latent_source.content(LENT[0])
    assert latent_reader.content((40, 41)) == latent_source.content(LENT[1])
    assert latent_source.wait_lease(params.lease_id).reason is LeaseEnd.DONE


def test_damage_in_a_latent_is_told_by_its_block(
    world: KVWorld, latent_source: Any, latent_reader: KVEngine, request_id: str
) -> None:
    latent_source.fill((*LENT[0], *LENT[1]), world.seed())
    params = latent_source.grant(request_id, LENT, NUM_TOKENS)
    latent_source.fill((12,), world.seed())

    ended = latent_reader.load(request_id, params, DESTINATION)

    assert ended.failed_block_ids == (32,)


def test_keys_and_values_that_take_as_much_are_refused(
    world: KVWorld, latent_reader: KVEngine, request_id: str
) -> None:
    other = world.make_source(world.spec("other", **{**SHAPE, "num_parts": KEYS_AND_VALUES, "head_dim": 36}))
    other.fill((*LENT[0], *LENT[1]), world.seed())
    params = other.grant(request_id, LENT, NUM_TOKENS)

    ended = latent_reader.load(request_id, params, DESTINATION)

    assert ended.error is not None
    assert all(text in ended.error for text in ("KV layout", "latents of 72", "KV heads of 36"))
    assert latent_reader.content((30,)) != other.content((10,))
