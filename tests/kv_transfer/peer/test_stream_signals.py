"""Killed and stopped peers of a hand-over that is read early: what was early costs time, and is never believed."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kv_transfer.connector import LeaseEnd
from kv_transfer.fault_options import Fault, FaultOptions, ScheduledFault
from kv_transfer.params import PeerIdentity
from kv_transfer.peer.part_reads import ReaderLimits
from tests.support.engine.kv_engine import KVEngine
from tests.support.kv.kv_child import ChildProcess
from tests.support.kv.kv_world import KVWorld
from tests.support.kv.ucx import confined_ucx
from tests.support.waiting import wait_until

BLOCK_BYTES = 256 << 10
PART = ReaderLimits(load_timeout_s=0.0, renewal_period_s=0.0).part_bytes // BLOCK_BYTES
"""Blocks that are read as one."""

BLOCKS = tuple(range(2 * PART))
EARLY = BLOCKS[:PART]
SHAPE = {"num_blocks": len(BLOCKS), "block_size": 16, "head_dim": 1024}
LATE_S = 100.0
FOR_EVER_S = 1e6
SHORT_TTL_S = 3.0


def _late(nth: int) -> FaultOptions:
    """The n-th read begins only when the reader's clock is advanced, so that everything before it has happened."""
    return FaultOptions(late_s=LATE_S, schedule=(ScheduledFault(fault=Fault.READ_LATE, nth=nth),))


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
def healthy(world: KVWorld) -> KVEngine:
    """A source in this process, to which nothing happens."""
    engine = world.make_reader(world.spec("healthy", **SHAPE))
    world.rendezvous.engines[engine.spec.engine_id] = engine
    return engine


@pytest.fixture
def child() -> Iterator[ChildProcess]:
    """A process for one engine, which the test may kill."""
    child = ChildProcess()
    yield child
    child.close()


def _identity(source: Any) -> PeerIdentity:
    return PeerIdentity(engine_id=source.spec.engine_id, incarnation=source.spec.incarnation)


def _make_victim(world: KVWorld, child: ChildProcess, **changes: Any) -> Any:
    """A source in the process that the test may kill or stop."""
    victim = child.create(world.spec("victim", **SHAPE, **changes))
    world.rendezvous.engines[victim.spec.engine_id] = victim
    victim.fill(BLOCKS, world.seed())
    return victim


def _make_reader(world: KVWorld, **changes: Any) -> KVEngine:
    return world.make_reader(world.spec("reader", **SHAPE, load_timeout_s=FOR_EVER_S, **changes))


def _begin_hanging_read(world: KVWorld, child: ChildProcess, victim: Any, request_id: str) -> KVEngine:
    """A reader whose early read was posted to a source that is stopped."""
    reader = _make_reader(world, faults=_late(1))
    assert reader.begin_stream(request_id, _identity(victim), BLOCKS)
    victim.announce(request_id, EARLY)
    wait_until(reader.has_reads)
    child.signal(signal.SIGSTOP)
    reader.advance_clock(LATE_S + 1)
    return reader


def _assert_next_load_works(world: KVWorld, reader: Any, source: Any) -> None:
    request_id = world.unique("request")
    source.fill((1, 2), world.seed())
    assert reader.load(request_id, source.grant(request_id, (1, 2)), (3, 4)).error is None
    assert reader.content((3, 4)) == source.content((1, 2))


@ON_BOTH
@pytest.mark.known_failure(4)
@pytest.mark.parametrize("moment", ("before", "during", "after"))
def test_source_killed_around_an_early_read_is_replaced_by_another(
    world: KVWorld, child: ChildProcess, healthy: KVEngine, moment: str
) -> None:
    """The router has the prompt prefilled elsewhere; nothing of the dead one's is left in the destination."""
    victim, request_id = _make_victim(world, child), world.unique("request")
    if moment == "during":
        reader = _begin_hanging_read(world, child, victim, request_id)
    else:
        reader = _make_reader(world)
        assert reader.begin_stream(request_id, _identity(victim), BLOCKS)
        wait_until(lambda: reader.stats().num_handshakes == 1)
    if moment == "after":
        victim.announce(request_id, EARLY)
        reader.wait_blocks(PART)
    child.signal(signal.SIGKILL)
    healthy.fill(BLOCKS, world.seed())

    ended = reader.load(request_id, healthy.grant(request_id, BLOCKS), BLOCKS, stream_id=request_id)

    assert ended.error is None
    assert reader.content(BLOCKS) == healthy.content(BLOCKS)
    assert reader.stats().num_streamed_blocks == 0
    assert not reader.has_reads()


@ON_BOTH
@pytest.mark.known_failure(1, 14)
def test_source_killed_after_its_lease_was_granted_takes_the_early_blocks_along(
    world: KVWorld, child: ChildProcess, healthy: KVEngine
) -> None:
    """Nobody is left who could confirm them, be they right."""
    victim, reader, request_id = _make_victim(world, child), _make_reader(world), world.unique("request")
    assert reader.begin_stream(request_id, _identity(victim), BLOCKS)
    victim.announce(request_id, EARLY)
    reader.wait_blocks(PART)
    params = victim.grant(request_id, BLOCKS)
    child.signal(signal.SIGKILL)

    assert reader.load(request_id, params, BLOCKS, stream_id=request_id).failed_block_ids == BLOCKS
    _assert_next_load_works(world, reader, healthy)


@pytest.mark.known_failure(4, 5)
def test_cancelled_stream_holds_its_blocks_while_a_stopped_source_may_still_write_them(
    world: KVWorld, child: ChildProcess, healthy: KVEngine
) -> None:
    victim, request_id = _make_victim(world, child), world.unique("request")
    reader = _begin_hanging_read(world, child, victim, request_id)

    assert not reader.cancel_stream(request_id)
    _assert_next_load_works(world, reader, healthy)
    assert request_id not in reader.ended_streams

    child.signal(signal.SIGCONT)
    reader.wait_stream(request_id)
    reader.fill(BLOCKS, world.seed())
    untouched = reader.content(BLOCKS[5:])
    _assert_next_load_works(world, reader, victim)
    assert reader.content(BLOCKS[5:]) == untouched
    assert not reader.has_reads()


@pytest.mark.known_failure(1)
def test_source_stopped_until_its_lease_ran_out_confirms_nothing_that_was_read_early(
    world: KVWorld, child: ChildProcess
) -> None:
    """Its lease expires by the clock that continues while it is stopped; renewals that wait for it come too late."""
    victim = _make_victim(world, child, lease_ttl_s=SHORT_TTL_S)
    reader, request_id = _make_reader(world, lease_ttl_s=SHORT_TTL_S), world.unique("request")
    assert reader.begin_stream(request_id, _identity(victim), BLOCKS)
    victim.announce(request_id, EARLY)
    reader.wait_blocks(PART)
    params = victim.grant(request_id, BLOCKS)
    child.signal(signal.SIGSTOP)
    reader.begin(request_id, params, BLOCKS, stream_id=request_id)
    wait_until(reader.has_reads)
    over_s = time.monotonic() + SHORT_TTL_S
    wait_until(lambda: time.monotonic() > over_s)
    child.signal(signal.SIGCONT)

    assert reader.wait_load(request_id).failed_block_ids == BLOCKS
    assert victim.wait_lease(params.lease_id).reason is LeaseEnd.EXPIRED
    assert reader.stats().num_streamed_blocks == 0
    _assert_next_load_works(world, reader, victim)


def _make_child_reader(world: KVWorld, child: ChildProcess, producer: KVEngine, **changes: Any) -> Any:
    """A reader in the process that the test may kill or stop. It only knows the producer."""
    reader = child.create(world.spec("child-reader", **SHAPE, load_timeout_s=FOR_EVER_S, **changes))
    producer.accept(reader.accept(producer.hello()))
    return reader


@ON_BOTH
@pytest.mark.known_failure(2)
@pytest.mark.parametrize("moment", ("before", "during", "after"))
def test_reader_killed_around_its_early_read_costs_the_source_one_lease(
    world: KVWorld, child: ChildProcess, moment: str
) -> None:
    """The source regains its blocks when the lease runs out, and serves others meanwhile."""
    producer = world.make_reader(world.spec("producer", **SHAPE))
    world.rendezvous.engines[producer.spec.engine_id] = producer
    doomed = _make_child_reader(world, child, producer, faults=_late(2))
    other, request_id = _make_reader(world), world.unique("request")
    num_announced = {"before": 0, "during": len(BLOCKS), "after": PART}[moment]
    if num_announced:
        assert doomed.begin_stream(request_id, _identity(producer), BLOCKS)
        producer.announce(request_id, BLOCKS[:num_announced])
        wait_until(lambda: doomed.stats().num_blocks == PART and doomed.has_reads() == (moment == "during"))
    child.signal(signal.SIGKILL)
    producer.announce(request_id, BLOCKS[num_announced:], num_announced)
    params = producer.grant(request_id, BLOCKS)

    _assert_next_load_works(world, other, producer)
    producer.advance_clock(producer.spec.lease_ttl_s + 1)
    assert producer.wait_lease(params.lease_id).reason is LeaseEnd.EXPIRED
    _assert_next_load_works(world, other, producer)


@ON_BOTH
@pytest.mark.known_failure(1, 2)
@pytest.mark.parametrize("moment", ("during", "after"))
def test_reader_stopped_around_its_early_read_beyond_its_lease_accepts_nothing(
    world: KVWorld, child: ChildProcess, moment: str
) -> None:
    """Without checksums: the source reuses the blocks meanwhile, and the reader does not notice by itself."""
    producer = world.make_reader(world.spec("producer", **SHAPE, checksums=False))
    late = _late(2) if moment == "during" else None
    reader = _make_child_reader(world, child, producer, checksums=False, faults=late)
    request_id = world.unique("request")
    assert reader.begin_stream(request_id, _identity(producer), BLOCKS)
    producer.announce(request_id, BLOCKS if moment == "during" else EARLY)
    wait_until(lambda: reader.stats().num_blocks == PART and reader.has_reads() == (moment == "during"))
    params = producer.grant(request_id, BLOCKS)
    child.signal(signal.SIGSTOP)
    producer.advance_clock(producer.spec.lease_ttl_s + 1)
    assert producer.wait_lease(params.lease_id).reason is LeaseEnd.EXPIRED
    producer.fill(BLOCKS, world.seed())
    child.signal(signal.SIGCONT)

    reader.begin(request_id, params, BLOCKS, 0, request_id)
    reader.advance_clock(LATE_S + 1)
    ended = reader.wait_load(request_id)

    assert ended.failed_block_ids == BLOCKS
    assert "lease" in str(ended.error)
    assert reader.stats().num_streamed_blocks == 0
    _assert_next_load_works(world, reader, producer)


@pytest.mark.known_failure(1)
def test_reader_stopped_while_the_prompt_is_computed_anew_reads_it_anew(world: KVWorld, child: ChildProcess) -> None:
    """Without checksums: the prefill was preempted while the reader stood still, and got the same blocks again."""
    producer = world.make_reader(world.spec("producer", **SHAPE, checksums=False))
    reader, request_id = _make_child_reader(world, child, producer, checksums=False), world.unique("request")
    producer.fill(BLOCKS, world.seed())
    assert reader.begin_stream(request_id, _identity(producer), BLOCKS)
    producer.announce(request_id, EARLY)
    wait_until(lambda: reader.stats().num_blocks == PART)
    child.signal(signal.SIGSTOP)
    producer.withdraw(request_id)
    producer.fill(BLOCKS, world.seed())
    producer.announce(request_id, EARLY)
    params = producer.grant(request_id, BLOCKS)
    child.signal(signal.SIGCONT)

    ended = reader.load(request_id, params, BLOCKS, 0, request_id)

    assert ended.error is None
    assert reader.content(BLOCKS) == producer.content(BLOCKS)
