"""Faults on purpose: what each does to one hand-over, and that the same seed does the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kv_transfer.connector import LeaseEnd
from kv_transfer.errors import InvalidOptionError
from kv_transfer.fault_options import Fault, FaultOptions, ScheduledFault
from kv_transfer.faults import FaultPlan
from kv_transfer.options import ConnectorOptions
from kv_transfer.peer.counters import TransferCounters
from tests.support.engine.kv_engine import KVEngine
from tests.support.kv.kv_world import KVWorld
from tests.support.kv.ucx import confined_ucx


@pytest.fixture(scope="module", params=["inproc", "nixl"])
def world(request: pytest.FixtureRequest) -> Iterator[KVWorld]:
    with confined_ucx():
        world = KVWorld(request.param)
        yield world
        world.close()


@pytest.fixture
def source(world: KVWorld) -> Any:
    engine = world.make_source(world.spec("source"))
    engine.fill(tuple(range(8)), world.seed())
    return engine


def _reader(world: KVWorld, faults: FaultOptions, *, checksums: bool = True) -> KVEngine:
    return world.make_reader(world.spec("reader", faults=faults, checksums=checksums))


def _only(fault: Fault, nth: int = 1, late_s: float = 0.05) -> FaultOptions:
    return FaultOptions(schedule=(ScheduledFault(fault=fault, nth=nth),), late_s=late_s)


def _meet(reader: KVEngine, source: Any) -> None:
    """Read once: of two that have not met, it is not said which of several reads begins first."""
    assert reader.load("met", source.grant("met", (4,)), (4,)).error is None


def test_same_seed_takes_the_same_occasions_whatever_else_is_configured() -> None:
    options = FaultOptions(seed=3, read_fails=0.3)
    others = FaultOptions(seed=3, read_fails=0.3, bit_flips=0.5)
    plans = [FaultPlan(option, TransferCounters()) for option in (options, others)]
    for _ in range(5):
        plans[1].hits(Fault.BIT_FLIPS)

    first, second = ([plan.hits(Fault.READ_FAILS) for _ in range(100)] for plan in plans)

    assert first == second
    assert 10 < sum(first) < 60


def test_every_occasion_is_taken_at_probability_one_and_none_at_zero() -> None:
    plan = FaultPlan(FaultOptions(read_late=1.0), TransferCounters())

    assert all(plan.hits(Fault.READ_LATE) for _ in range(50))
    assert not any(plan.hits(Fault.READ_FAILS) for _ in range(50))


def test_scheduled_occasion_is_taken_once_and_counted() -> None:
    counters = TransferCounters()
    plan = FaultPlan(_only(Fault.LEASE_EXPIRED, nth=3), counters)

    assert [plan.hits(Fault.LEASE_EXPIRED) for _ in range(5)] == [False, False, True, False, False]
    assert counters.num_injected_faults == 1


@pytest.mark.parametrize(
    "options", [{"read_fails": 1.5}, {"bit_flips": -0.1}, {"late_s": -1.0}, {"late_s": float("nan")}]
)
def test_impossible_values_are_refused_by_name(options: dict[str, float]) -> None:
    with pytest.raises(InvalidOptionError, match=rf"faults\.{next(iter(options))}"):
        FaultOptions(**options)  # type: ignore[arg-type]  # every option here is a number


def test_faults_that_nobody_allowed_are_refused() -> None:
    with pytest.raises(InvalidOptionError, match="allow_faults"):
        ConnectorOptions(faults=FaultOptions())


@pytest.mark.known_failure(21)
def test_one_failed_read_is_retried(world: KVWorld, source: Any) -> None:
    reader = _reader(world, _only(Fault.READ_FAILS))

    ended = reader.load("a", source.grant("a", (1, 2)), (5, 6))

    assert ended.error is None
    assert reader.content((5, 6)) == source.content((1, 2))
    assert reader.stats().num_retried_loads == 1
    assert reader.stats().num_injected_faults == 1


def test_late_read_writes_late_and_is_good(world: KVWorld, source: Any) -> None:
    reader = _reader(world, _only(Fault.READ_LATE, nth=2, late_s=30.0))
    _meet(reader, source)
    reader.begin("a", source.grant("a", (1,)), (5,))
    assert reader.load("b", source.grant("b", (2,)), (6,)).error is None
    assert reader.content((5,)) == bytes(reader.spec.layout.block_bytes)

    reader.advance_clock(31.0)

    assert reader.wait_load("a").error is None
    assert reader.content((5,)) == source.content((1,))


@pytest.mark.known_failure(4, 14)
def test_hanging_read_holds_its_destination_and_nothing_more_is_read_from_that_peer(
    world: KVWorld, source: Any
) -> None:
    """Later requests do not wait for the same peer again."""
    reader = _reader(world, _only(Fault.READ_HANGS, nth=2))
    _meet(reader, source)
    reader.begin("a", source.grant("a", (1,)), (5,))
    assert reader.load("b", source.grant("b", (2,)), (6,)).error is None
    reader.advance_clock(61.0)
    reader.wait_stalled("a")

    ended = reader.load("c", source.grant("c", (3,)), (7,))

    assert "have not ended yet" in str(ended.error)
    assert [load.request_id for load in reader.loads] == ["met", "b", "c"]
    reader.close()
    assert reader.wait_load("a").failed_block_ids == (5,)


def test_flipped_bit_changes_one_bit(world: KVWorld, source: Any) -> None:
    reader = _reader(world, _only(Fault.BIT_FLIPS))

    reader.load("a", source.grant("a", (1, 2, 3)), (5, 6, 7))

    ours, theirs = (int.from_bytes(e.content(b), "little") for e, b in ((reader, (5, 6, 7)), (source, (1, 2, 3))))
    assert (ours ^ theirs).bit_count() == 1


@pytest.mark.known_failure(18)
def test_refused_handshake_fails_the_load_by_name(world: KVWorld, source: Any) -> None:
    reader = _reader(world, _only(Fault.HANDSHAKE_REFUSED))

    ended = reader.load("a", source.grant("a", (1,)), (5,))

    assert "handshake refused: injected fault" in str(ended.error)
    reader.advance_clock(2.0)
    assert reader.load("b", source.grant("b", (1,)), (5,)).error is None


@pytest.mark.known_failure(6)
@pytest.mark.parametrize("fault", [Fault.NOTIFICATION_LOST, Fault.NOTIFICATION_LATE, Fault.NOTIFICATION_TWICE])
def test_message_that_is_lost_late_or_doubled_costs_nothing(world: KVWorld, source: Any, fault: Fault) -> None:
    reader = _reader(world, _only(fault))
    params = source.grant("a", (1, 2))

    ended = reader.load("a", params, (5, 6))

    assert ended.error is None
    assert reader.content((5, 6)) == source.content((1, 2))
    assert source.wait_lease(params.lease_id).reason is LeaseEnd.DONE
    assert reader.stats().num_injected_faults == 1


@pytest.mark.known_failure(1)
def test_lease_that_expires_under_the_reader_makes_the_load_bad(world: KVWorld) -> None:
    source = world.make_source(world.spec("source", faults=_only(Fault.LEASE_EXPIRED)))
    reader = world.make_reader(world.spec("reader"))
    params = source.grant("a", (1, 2))

    ended = reader.load("a", params, (5, 6))

    assert ended.failed_block_ids == (5, 6)
    assert "the lease ended" in str(ended.error)
    assert source.wait_lease(params.lease_id).reason is LeaseEnd.EXPIRED


@pytest.mark.known_failure(12)
def test_replaced_peer_is_found_out_and_met_again_later(world: KVWorld, source: Any) -> None:
    reader = _reader(world, _only(Fault.PEER_REPLACED))

    ended = reader.load("a", source.grant("a", (1,)), (5,))

    assert "incarnation 1 is gone, replaced-0 answered" in str(ended.error)
    reader.advance_clock(2.0)
    assert reader.load("b", source.grant("b", (2,)), (6,)).error is None
    assert reader.content((6,)) == source.content((2,))


@pytest.mark.known_failure(1)
def test_blocks_that_are_reused_under_the_reader_are_never_good_even_without_checksums(
    world: KVWorld, source: Any
) -> None:
    """The bytes that arrive are those of the next request."""
    reader = _reader(world, _only(Fault.READ_LATE, nth=2, late_s=30.0), checksums=False)
    _meet(reader, source)
    params = source.grant("a", (1, 2))
    reader.begin("a", params, (5, 6))
    assert reader.load("b", source.grant("b", (3,)), (7,)).error is None
    source.advance_clock(source.spec.lease_ttl_s + 1)
    assert source.wait_lease(params.lease_id).reason is LeaseEnd.EXPIRED
    source.fill((1, 2), world.seed())

    reader.advance_clock(31.0)

    assert reader.wait_load("a").failed_block_ids == (5, 6)
    assert reader.content((5, 6)) == source.content((1, 2))
