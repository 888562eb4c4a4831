"""Peers on one machine that are killed or stopped: the transport reports no death, and copies from stopped
processes.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kv_transfer.connector import LeaseEnd
from kv_transfer.params import PeerIdentity
from tests.support.engine.kv_engine import KVEngine
from tests.support.kv.kv_child import ChildProcess
from tests.support.kv.kv_world import KVWorld
from tests.support.waiting import wait_until

# 256 blocks of 256 KiB: to copy all of them takes tens of milliseconds.
LARGE = {"num_blocks": 256, "block_size": 16, "head_dim": 1024}
ALL_BLOCKS = tuple(range(256))
SMALL = {**LARGE, "num_blocks": 8}
TINY = {"num_blocks": 8, "block_size": 1, "head_dim": 4}
SHORT_TTL_S = 3.0
FOR_EVER = {"load_timeout_s": 1e6, "lease_ttl_s": 1e6}
"""Nothing ends by other times than that of an answer."""


@pytest.fixture(scope="module")
def world() -> Iterator[KVWorld]:
    world = KVWorld("nixl", transport="local")
    yield world
    world.close()


@pytest.fixture
def child() -> Iterator[ChildProcess]:
    """A process for one engine, which the test may kill."""
    child = ChildProcess()
    yield child
    child.close()


def _make_victim(world: KVWorld, child: ChildProcess, **changes: Any) -> Any:
    victim = child.create(world.spec("victim", **changes))
    world.rendezvous.engines[victim.spec.engine_id] = victim
    return victim


def _assert_load_works(world: KVWorld, reader: KVEngine, source: Any) -> None:
    request_id = world.unique("request")
    source.fill((1, 2), world.seed())
    assert reader.load(request_id, source.grant(request_id, (1, 2)), (3, 4)).error is None
    assert reader.content((3, 4)) == source.content((1, 2))


@pytest.mark.known_failure(4, 5)
@pytest.mark.parametrize("delay_s", (0.0, 0.002, 0.005, 0.01, 0.02, 0.04))
def test_source_killed_around_a_copy_is_a_failed_load_and_holds_nothing(
    world: KVWorld, child: ChildProcess, delay_s: float
) -> None:
    """Wherever in the copy, or in the wait for the confirmation, the kill falls."""
    reader, healthy = (world.make_reader(world.spec(name, **LARGE)) for name in ("reader", "healthy"))
    world.rendezvous.engines[healthy.spec.engine_id] = healthy
    victim = _make_victim(world, child, **LARGE)
    _assert_load_works(world, reader, victim)
    granted = victim.grant("a", ALL_BLOCKS)
    killing = threading.Timer(delay_s, child.signal, (signal.SIGKILL,))
    killing.start()

    ended = reader.load("a", granted, ALL_BLOCKS)
    killing.join()

    assert ended.failed_block_ids in (ALL_BLOCKS, ())
    assert not reader.has_reads()
    _assert_load_works(world, reader, healthy)


@pytest.mark.known_failure(4, 5)
@pytest.mark.parametrize("shape", (TINY, LARGE), ids=("tiny", "large"))
def test_source_killed_while_stopped_is_a_failed_load(
    world: KVWorld, child: ChildProcess, shape: dict[str, int]
) -> None:
    """Its memory can be read until it dies, but nobody confirms that its lease was alive."""
    reader = world.make_reader(world.spec("reader", **shape))
    victim = _make_victim(world, child, **shape)
    _assert_load_works(world, reader, victim)
    blocks = tuple(range(shape["num_blocks"]))
    params, cancelled = victim.grant("a", blocks), victim.grant("b", (1, 2))
    num_blocks = reader.stats().num_blocks
    child.signal(signal.SIGSTOP)
    reader.begin("a", params, blocks)
    reader.begin("b", cancelled, (1, 2))
    reader.cancel("b")
    wait_until(lambda: reader.stats().num_blocks >= num_blocks + len(blocks))
    child.signal(signal.SIGKILL)

    assert reader.wait_load("a").failed_block_ids == blocks
    assert reader.wait_load("b").failed_block_ids == (1, 2)
    assert not reader.has_reads()


@pytest.mark.known_failure(4, 14)
def test_nothing_is_held_for_a_stopped_source_and_it_is_used_again_when_it_goes_on(world: KVWorld) -> None:
    reader = world.make_reader(world.spec("reader", **SMALL, **FOR_EVER, answer_timeout_s=10.0))
    source = world.make_source(world.spec("source", **SMALL, **FOR_EVER))
    _assert_load_works(world, reader, source)
    params = source.grant("a", (1, 2))

    source.child.signal(signal.SIGSTOP)
    reader.begin("a", params, (5, 6))
    reader.age_until(lambda: any(load.request_id == "a" for load in reader.loads))
    source.child.signal(signal.SIGCONT)

    ended = reader.wait_load("a")
    assert ended.failed_block_ids == (5, 6)
    assert ended.error == f"{source.spec.engine_id} was silent for 10 s"
    assert not reader.has_reads()
    _assert_load_works(world, reader, source)


@pytest.mark.known_failure(1)
@pytest.mark.parametrize("is_streamed", (False, True), ids=("load", "stream"))
def test_source_that_was_stopped_until_its_leases_ran_out_does_not_confirm(world: KVWorld, is_streamed: bool) -> None:
    reader = world.make_reader(world.spec("reader", **LARGE, lease_ttl_s=SHORT_TTL_S))
    source = world.make_source(world.spec("source", **LARGE, lease_ttl_s=SHORT_TTL_S))
    _assert_load_works(world, reader, source)
    request_id = world.unique("request")
    if is_streamed:
        identity = PeerIdentity(engine_id=source.spec.engine_id, incarnation=source.spec.incarnation)
        num_blocks = reader.stats().num_blocks
        assert reader.begin_stream(request_id, identity, ALL_BLOCKS)
        source.announce(request_id, ALL_BLOCKS[:100])
        reader.wait_blocks(num_blocks + 100)
    params = source.grant(request_id, ALL_BLOCKS)
    source.child.signal(signal.SIGSTOP)
    reader.begin(request_id, params, ALL_BLOCKS, stream_id=request_id if is_streamed else None)
    over_s = time.monotonic() + SHORT_TTL_S
    wait_until(lambda: time.monotonic() > over_s)
    source.child.signal(signal.SIGCONT)

    assert reader.wait_load(request_id).failed_block_ids == ALL_BLOCKS
    assert source.wait_lease(params.lease_id).reason is LeaseEnd.EXPIRED
    assert reader.stats().num_streamed_blocks == 0
    _assert_load_works(world, reader, source)


@pytest.mark.known_failure(4, 5)
def test_cancelled_stream_of_a_stopped_source_ends_and_writes_nothing_later(world: KVWorld) -> None:
    reader, source = world.make_reader(world.spec("reader", **SMALL)), world.make_source(world.spec("source", **SMALL))
    request_id = world.unique("request")
    identity = PeerIdentity(engine_id=source.spec.engine_id, incarnation=source.spec.incarnation)
    assert reader.begin_stream(request_id, identity, (4, 5, 6))
    source.announce(request_id, (1, 2))
    reader.wait_blocks(2)
    source.child.signal(signal.SIGSTOP)

    assert reader.cancel_stream(request_id)
    reader.fill((4, 5, 6), world.seed())
    untouched = reader.content((4, 5, 6))
    source.child.signal(signal.SIGCONT)

    source.withdraw(request_id)
    request_id = world.unique("request")
    assert reader.load(request_id, source.grant(request_id, (1,)), (7,)).error is None
    assert reader.content((4, 5, 6)) == untouched


@pytest.mark.known_failure(12)
def test_peer_that_is_killed_and_comes_back_again_and_again_costs_no_memory(world: KVWorld) -> None:
    """Nobody says goodbye: what was mapped of the dead is let go of when the next life is met."""
    reader = world.make_reader(world.spec("reader", **TINY))
    engine_id = world.unique("phoenix")
    num_mapped, num_lives = [], 9
    for life in range(num_lives):
        child = ChildProcess()
        phoenix = child.create(world.spec("phoenix", **TINY, incarnation=str(life)))
        world.rendezvous.engines[phoenix.spec.engine_id] = phoenix
        _assert_load_works(world, reader, phoenix)
        child.signal(signal.SIGKILL)
        ended = reader.load(f"{engine_id}-{life}", _granted_by_the_dead(reader, phoenix), (3, 4))
        assert ended.failed_block_ids == (3, 4)
        child.close()
        num_mapped.append(_num_segments())

    # UCX maps up to six segments late; what is never let go of would be one a life at least
    assert num_mapped[-1] - num_mapped[0] < num_lives - 1, num_mapped


def _granted_by_the_dead(reader: KVEngine, source: Any) -> Any:
    """A lease as the source would have granted it."""
    params = reader.grant("template", (1, 2))
    reader.abort_lease("template")
    identity = PeerIdentity(engine_id=source.spec.engine_id, incarnation=source.spec.incarnation)
    return type(params)(**{name: getattr(params, name) for name in params.__dataclass_fields__} | {"source": identity})


def _num_segments() -> int:
    with open("/proc/self/maps") as maps:
        return sum("/dev/shm/ucx_shm_posix" in line for line in maps)
