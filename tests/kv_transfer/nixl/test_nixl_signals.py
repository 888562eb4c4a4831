"""Peers that are really killed and stopped, before, during and after a read, on both sides."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kv_transfer.connector import LeaseEnd, LoadEnded
from kv_transfer.fault_options import Fault, FaultOptions, ScheduledFault
from kv_transfer.peer.part_reads import ReaderLimits, split_blocks
from tests.support.engine.kv_engine import KVEngine
from tests.support.kv.kv_child import ChildProcess
from tests.support.kv.kv_world import KVWorld
from tests.support.kv.ucx import confined_ucx
from tests.support.waiting import wait_until

# 256 blocks of 256 KiB: a read of all of them is far from over when it was posted over TCP.
LARGE = {"num_blocks": 256, "block_size": 16, "head_dim": 1024}
SMALL = {**LARGE, "num_blocks": 8}
ALL_BLOCKS = tuple(range(256))
BLOCK_BYTES = 256 << 10
SHORT_TTL_S = 3.0
LATE_BLOCKS = tuple(
    split_blocks(
        ALL_BLOCKS,
        ALL_BLOCKS,
        None,
        block_bytes=BLOCK_BYTES,
        limits=ReaderLimits(load_timeout_s=0.0, renewal_period_s=0.0),
    )
)[1].block_ids
"""The blocks of the second read."""


ON_BOTH = pytest.mark.parametrize("world", ("network", "local"), indirect=True)
"""For tests without a read that hangs."""


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest) -> Iterator[KVWorld]:
    """TCP unless a test asks: from shared memory a read needs no help of the peer, and is over when it was posted."""
    with confined_ucx(transports="tcp,self"):
        world = KVWorld("nixl", transport=getattr(request, "param", "network"))
        yield world
        world.close()


@pytest.fixture(scope="module")
def reader(world: KVWorld) -> KVEngine:
    return world.make_reader(world.spec("reader", **LARGE))


@pytest.fixture(scope="module")
def source(world: KVWorld) -> Any:
    """A source in the other process, which tests may stop but not kill."""
    return world.make_source(world.spec("source", **LARGE))


@pytest.fixture(scope="module")
def healthy(world: KVWorld) -> KVEngine:
    """A source in this process, to which nothing happens."""
    engine = world.make_reader(world.spec("healthy", **SMALL))
    world.rendezvous.engines[engine.spec.engine_id] = engine
    return engine


def _assert_next_load_works(world: KVWorld, reader: KVEngine, source: Any) -> None:
    request_id = world.unique("request")
    source.fill((1, 2), world.seed())
    ended = reader.load(request_id, source.grant(request_id, (1, 2)), (3, 4))
    assert ended.error is None
    assert reader.content((3, 4)) == source.content((1, 2))


@dataclass(frozen=True)
class Killed:
    """How loads ended whose source was killed when they stood at different points."""

    before_it_was_met: LoadEnded
    between_two_reads: LoadEnded
    during_a_read: LoadEnded
    during_a_cancelled_read: LoadEnded
    num_ended_before_the_kill: int


@pytest.fixture(scope="module")
def killed(world: KVWorld, reader: KVEngine, healthy: KVEngine) -> Killed:
    child = ChildProcess()
    victim = child.create(world.spec("victim", **LARGE))
    world.rendezvous.engines[victim.spec.engine_id] = victim
    acquaintance = world.make_reader(world.spec("acquaintance", **SMALL))
    stranger = world.make_reader(world.spec("stranger", **SMALL))
    _assert_next_load_works(world, reader, victim)
    _assert_next_load_works(world, acquaintance, victim)
    granted = {name: victim.grant(name, (1, 2)) for name in ("before", "between")}
    granted |= {name: victim.grant(name, ALL_BLOCKS) for name in ("during", "cancelled")}
    num_ended = len(reader.loads)
    child.signal(signal.SIGSTOP)
    for name in ("during", "cancelled"):
        reader.begin(name, granted[name], ALL_BLOCKS)
    wait_until(reader.has_reads)
    reader.cancel("cancelled")
    _assert_next_load_works(world, reader, healthy)
    num_ended = len(reader.loads) - num_ended - 1
    child.signal(signal.SIGKILL)
    results = Killed(
        before_it_was_met=stranger.load("before", granted["before"], (3, 4)),
        between_two_reads=acquaintance.load("between", granted["between"], (3, 4)),
        during_a_read=reader.wait_load("during"),
        during_a_cancelled_read=reader.wait_load("cancelled"),
        num_ended_before_the_kill=num_ended,
    )
    child.close()
    return results


def test_source_killed_before_it_is_met_is_a_failed_load(killed: Killed) -> None:
    assert killed.before_it_was_met.failed_block_ids == (3, 4)


def test_source_killed_between_two_reads_is_a_failed_load(killed: Killed) -> None:
    assert killed.between_two_reads.failed_block_ids == (3, 4)


def test_source_killed_during_a_read_is_a_failed_load(killed: Killed) -> None:
    assert killed.during_a_read.failed_block_ids == ALL_BLOCKS


@pytest.mark.known_failure(4, 5)
def test_cancelled_load_ends_when_its_stopped_source_dies_and_not_before(killed: Killed) -> None:
    assert killed.num_ended_before_the_kill == 0
    assert killed.during_a_cancelled_read.failed_block_ids == ALL_BLOCKS


def test_after_a_kill_nothing_is_held_and_the_next_peer_works(
    world: KVWorld, killed: Killed, reader: KVEngine, healthy: KVEngine
) -> None:
    assert not reader.has_reads()
    _assert_next_load_works(world, reader, healthy)


@pytest.mark.known_failure(4, 14)
def test_destination_is_held_while_a_stopped_source_may_still_write_it(
    world: KVWorld, reader: KVEngine, source: Any, healthy: KVEngine
) -> None:
    """The request continues after the deadline, its destination stays held."""
    _assert_next_load_works(world, reader, source)
    request_id = world.unique("request")
    params = source.grant(request_id, ALL_BLOCKS)
    source.child.signal(signal.SIGSTOP)
    reader.begin(request_id, params, ALL_BLOCKS)
    wait_until(reader.has_reads)
    reader.advance_clock(reader.spec.load_timeout_s + 1)

    reader.wait_stalled(request_id)
    _assert_next_load_works(world, reader, healthy)
    assert reader.has_reads()
    assert request_id not in [ended.request_id for ended in reader.loads]

    source.child.signal(signal.SIGCONT)
    assert reader.wait_load(request_id).failed_block_ids == ALL_BLOCKS
    assert not reader.has_reads()
    assert source.wait_lease(params.lease_id).reason is LeaseEnd.ABORTED
    _assert_next_load_works(world, reader, source)


@pytest.mark.known_failure(1)
def test_source_that_was_stopped_until_its_leases_ran_out_does_not_confirm(
    world: KVWorld,
) -> None:
    """It could not notice that the deadline passed, and must not miss it when it continues."""
    reader = world.make_reader(world.spec("reader", **LARGE, lease_ttl_s=SHORT_TTL_S))
    source = world.make_source(world.spec("source", **LARGE, lease_ttl_s=SHORT_TTL_S))
    _assert_next_load_works(world, reader, source)
    request_id = world.unique("request")
    params = source.grant(request_id, ALL_BLOCKS)
    source.child.signal(signal.SIGSTOP)
    reader.begin(request_id, params, ALL_BLOCKS)
    wait_until(reader.has_reads)
    over_s = time.monotonic() + SHORT_TTL_S
    wait_until(lambda: time.monotonic() > over_s)
    source.child.signal(signal.SIGCONT)

    assert reader.wait_load(request_id).failed_block_ids == ALL_BLOCKS
    assert source.wait_lease(params.lease_id).reason is LeaseEnd.EXPIRED
    _assert_next_load_works(world, reader, source)


@ON_BOTH
@pytest.mark.known_failure(2)
@pytest.mark.parametrize("moment", ("before", "during", "after"))
def test_reader_killed_around_its_read_costs_the_source_one_lease(world: KVWorld, source: Any, moment: str) -> None:
    """The source regains its blocks when the lease runs out, and serves others."""
    producer = world.make_reader(world.spec("producer", **LARGE))
    child = ChildProcess()
    late = FaultOptions(late_s=1e6, schedule=(ScheduledFault(fault=Fault.READ_LATE, nth=2),))
    doomed = child.create(world.spec("doomed", **LARGE, faults=late if moment == "during" else None))
    for engine in (doomed, source):
        producer.accept(engine.accept(producer.hello()))
    request_id, other = world.unique("request"), world.unique("request")
    params, kept = producer.grant(request_id, ALL_BLOCKS), producer.grant(other, (1, 2))
    if moment == "during":
        doomed.begin(request_id, params, ALL_BLOCKS)
        wait_until(lambda: doomed.stats().num_blocks == len(ALL_BLOCKS) - len(LATE_BLOCKS))
    elif moment == "after":
        assert doomed.load(request_id, params, ALL_BLOCKS).error is None
    child.signal(signal.SIGKILL)

    assert source.load(other, kept, (3, 4)).error is None
    producer.advance_clock(producer.spec.lease_ttl_s + 1)
    reason = LeaseEnd.DONE if moment == "after" else LeaseEnd.EXPIRED
    assert producer.wait_lease(params.lease_id).reason is reason
    assert producer.wait_lease(kept.lease_id).reason is LeaseEnd.DONE
    child.close()


@ON_BOTH
@pytest.mark.known_failure(1, 2)
@pytest.mark.parametrize("moment", ("before", "during"))
def test_reader_stopped_beyond_its_lease_never_accepts_what_it_reads_when_it_goes_on(
    world: KVWorld, moment: str
) -> None:
    """Without checksums: the source regains its blocks and reuses them, and the reader does not notice by itself."""
    late = FaultOptions(late_s=1e6, schedule=(ScheduledFault(fault=Fault.READ_LATE, nth=2),))
    producer = world.make_reader(world.spec("producer", **LARGE, checksums=False))
    child = ChildProcess()
    reader = child.create(world.spec("reader", **LARGE, checksums=False, load_timeout_s=1e9, faults=late))
    producer.accept(reader.accept(producer.hello()))
    request_id = world.unique("request")
    params = producer.grant(request_id, ALL_BLOCKS)
    if moment == "during":
        reader.begin(request_id, params, ALL_BLOCKS)
        wait_until(lambda: reader.stats().num_blocks == len(ALL_BLOCKS) - len(LATE_BLOCKS))
    child.signal(signal.SIGSTOP)
    producer.advance_clock(producer.spec.lease_ttl_s + 1)
    assert producer.wait_lease(params.lease_id).reason is LeaseEnd.EXPIRED
    producer.fill(ALL_BLOCKS, world.seed())
    child.signal(signal.SIGCONT)
    if moment == "before":
        reader.begin(request_id, params, ALL_BLOCKS)
    wait_until(lambda: reader.stats().num_blocks == len(ALL_BLOCKS) - len(LATE_BLOCKS))
    reader.advance_clock(1e6 + 1)

    ended = reader.wait_load(request_id)
    assert ended.failed_block_ids == ALL_BLOCKS
    assert "lease" in str(ended.error)
    assert reader.content(LATE_BLOCKS) == producer.content(LATE_BLOCKS), "the next request's bytes did arrive"
    _assert_next_load_works(world, reader, producer)
    child.close()


@ON_BOTH
def test_reader_stopped_after_its_read_keeps_what_it_has(world: KVWorld) -> None:
    producer = world.make_reader(world.spec("producer", **SMALL))
    child = ChildProcess()
    reader = child.create(world.spec("reader", **SMALL))
    producer.accept(reader.accept(producer.hello()))
    producer.fill((1, 2), world.seed())
    request_id, content = world.unique("request"), producer.content((1, 2))
    params = producer.grant(request_id, (1, 2))
    assert reader.load(request_id, params, (3, 4)).error is None
    child.signal(signal.SIGSTOP)
    assert producer.wait_lease(params.lease_id).reason is LeaseEnd.DONE
    producer.advance_clock(producer.spec.lease_ttl_s + 1)
    producer.fill((1, 2), world.seed())
    child.signal(signal.SIGCONT)

    assert reader.content((3, 4)) == content
    _assert_next_load_works(world, reader, producer)
    child.close()


@ON_BOTH
@pytest.mark.known_failure(12)
def test_peer_killed_and_restarted_in_another_process_under_the_same_name(world: KVWorld, reader: KVEngine) -> None:
    """No farewell, then back with a new incarnation."""
    spec = world.spec("phoenix", **SMALL)
    child = ChildProcess()
    world.rendezvous.engines[spec.engine_id] = first = child.create(spec)
    _assert_next_load_works(world, reader, first)
    child.signal(signal.SIGKILL)
    second = world.make_source(replace(spec, incarnation="2"))

    _assert_next_load_works(world, reader, second)
    child.close()
