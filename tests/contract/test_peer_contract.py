"""How connectors meet their peers: peers that are refused, gone, or restarted as a new incarnation."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from kv_transfer.errors import HandshakeRefusedError, KVTransferError
from kv_transfer.params import PROTOCOL_VERSION, KVTransferParams, PeerIdentity
from tests.support.engine.kv_engine import KVEngine
from tests.support.kv.kv_world import KVWorld


def _params_of_nobody(like: KVTransferParams) -> KVTransferParams:
    return replace(like, source=PeerIdentity(engine_id="nobody", incarnation="1"), lease_id="no-lease")


@pytest.mark.known_failure(18)
def test_load_from_an_unknown_engine_fails_and_others_go_on(
    world: KVWorld, source: Any, reader: KVEngine, request_id: str
) -> None:
    """A failed handshake is a failed load."""
    params = source.grant(request_id, (1,))
    lost = world.unique("request")

    reader.begin(lost, _params_of_nobody(params), (2,))

    assert reader.load(request_id, params, (3,)).error is None
    ended = reader.wait_load(lost)
    assert ended.failed_block_ids == (2,)
    assert "nobody" in str(ended.error)


def test_peer_that_cannot_be_met_is_not_asked_at_once_again(
    world: KVWorld, source: Any, reader: KVEngine, request_id: str
) -> None:
    params = source.grant(request_id, (1,))
    source.abort_lease(request_id)
    nobody = replace(params, source=PeerIdentity(engine_id=world.unique("nobody"), incarnation="1"))
    with reader.standing_clock():
        reader.load(world.unique("request"), replace(nobody, lease_id="a"), (2,))
        num_failed = reader.stats().num_handshakes_failed

        reader.load(world.unique("request"), replace(nobody, lease_id="b"), (2,))
        assert reader.stats().num_handshakes_failed == num_failed

        reader.advance_clock(2.0)
        reader.load(world.unique("request"), replace(nobody, lease_id="c"), (2,))
        assert reader.stats().num_handshakes_failed == num_failed + 1


def test_other_layout_is_refused_naming_both(world: KVWorld, reader: KVEngine, request_id: str) -> None:
    other = world.make_source(world.spec("other", model_hash="other-model"))
    params = other.grant(request_id, (1,))

    ended = reader.load(request_id, params, (3,))

    assert ended.failed_block_ids == (3,)
    assert "model other-model" in str(ended.error)
    assert "model model" in str(ended.error)
    assert reader.match(replace(params, lease_id="unspent"), 4, 0).num_tokens == 0


def test_other_layout_is_refused_by_the_engine_that_is_met(source: Any, reader: KVEngine) -> None:
    hello = replace(reader.hello(), layout_hash="0123", layout_description="something else")

    with pytest.raises(HandshakeRefusedError, match=r"KV layout.*something else") as refused:
        source.accept(hello)

    assert source.spec.layout.layout_hash in str(refused.value)


def test_other_protocol_version_is_refused_naming_both(source: Any, reader: KVEngine) -> None:
    hello = replace(reader.hello(), protocol_version=PROTOCOL_VERSION + 1, layout_hash="also different")

    with pytest.raises(HandshakeRefusedError, match="protocol version") as refused:
        source.accept(hello)

    assert (refused.value.ours, refused.value.theirs) == (PROTOCOL_VERSION, PROTOCOL_VERSION + 1)


@pytest.mark.known_failure(12)
def test_restarted_engine_is_met_again_and_its_old_leases_are_void(world: KVWorld, reader: KVEngine) -> None:
    """The same engine id, another life."""
    spec = world.spec("phoenix")
    first = world.make_source(spec)
    first.fill((1, 2), world.seed())
    before, stale = first.grant(world.unique("request"), (1,)), first.grant(world.unique("request"), (2,))
    assert reader.load(world.unique("request"), before, (1,)).error is None
    first.close()

    second = world.make_source(replace(spec, incarnation="2"))
    second.fill((1, 2), world.seed())
    fresh = second.grant(world.unique("request"), (1,))
    assert reader.load(world.unique("request"), fresh, (4,)).error is None
    assert reader.content((4,)) == second.content((1,))

    ended = reader.load(world.unique("request"), stale, (5,))
    assert ended.failed_block_ids == (5,)
    assert "incarnation 1 is gone" in str(ended.error)
    again = second.grant(world.unique("request"), (2,))
    assert reader.load(world.unique("request"), again, (6,)).error is None


def test_hand_over_of_a_closed_engine_fails_and_the_next_peer_works(
    world: KVWorld, source: Any, reader: KVEngine, request_id: str
) -> None:
    leaving = world.make_source(world.spec("leaving"))
    known, lost = leaving.grant(world.unique("request"), (1,)), leaving.grant(world.unique("request"), (2,))
    assert reader.load(world.unique("request"), known, (1,)).error is None
    leaving.close()

    assert reader.load(world.unique("request"), lost, (2,)).failed_block_ids == (2,)
    assert reader.load(request_id, source.grant(request_id, (1,)), (3,)).error is None


def test_close_joins_the_threads_and_can_be_repeated(world: KVWorld, source: Any, request_id: str) -> None:
    before = set(threading.enumerate())
    engine = world.make_reader(world.spec("short-lived"))
    assert engine.load(request_id, source.grant(request_id, (1,)), (3,)).error is None
    granted = engine.grant(request_id, (4,))

    engine.close()
    engine.close()

    assert not set(threading.enumerate()) - before
    assert engine.wait_lease(granted.lease_id).request_id == request_id
    late = world.unique("request")
    assert engine.load(late, source.grant(late, (1,)), (3,)).failed_block_ids == (3,)
    source.abort_lease(late)
    with pytest.raises(KVTransferError, match="closed"):
        engine.accept(source.hello())
