"""Streams leave workers in trouble for others with room: within limits, once, and in total no more than necessary."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.step_time import UNKNOWN_STEP_TIME
from router.balance.moves import MARGIN, MoveLimits, StreamState, WorkerState, plan_moves
from router.balance.streams import MoveReason
from tests.support.router.balance_world import MODEL, WAITS, BalanceWorld

ITL_S = 0.05
QUICK = settings(max_examples=8, deadline=None)


def crowded(num_rows: int, *, num_workers: int = 2, num_routers: int = 1, seed: int = 0) -> BalanceWorld:
    """All streams are at the first worker, those of the routers in turn."""
    world = BalanceWorld(num_workers=num_workers, num_routers=num_routers, seed=seed)
    for index in range(num_rows):
        world.add("w0", router=index % num_routers)
    world.reports = {name: world.load_of(name) for name in world.names}
    return world


@QUICK
@given(num_rows=st.integers(46, 80), num_workers=st.integers(2, 5), seed=st.integers(0, 1000))
def test_worker_that_breaks_its_promise_is_relieved_and_then_nothing_moves(
    num_rows: int, num_workers: int, seed: int
) -> None:
    world = crowded(num_rows, num_workers=num_workers, seed=seed)

    world.run(70, grows=False)
    num_moves = len(world.moves)
    world.run(15, grows=False)

    assert world.state("w0").gap_s <= ITL_S
    assert all(world.state(name).gap_s <= (1 - MARGIN) * ITL_S for name in world.names[1:])
    assert 0 < num_moves == len(world.moves) <= num_rows - 44 + 1
    assert {reason for *_, reason in world.moves} == {MoveReason.GAP}


@QUICK
@given(
    rows=st.lists(st.integers(0, 44), min_size=2, max_size=5),
    num_routers=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_steady_load_that_every_worker_can_bear_moves_nothing(rows: list[int], num_routers: int, seed: int) -> None:
    world = BalanceWorld(num_workers=len(rows), num_routers=num_routers, seed=seed)
    for name, number in zip(world.names, rows, strict=True):
        for index in range(number):
            world.add(name, router=index % num_routers)

    world.run(20, grows=False)

    assert world.moves == []


@QUICK
@given(
    num_rows=st.integers(48, 80),
    num_others=st.integers(0, 38),
    num_routers=st.integers(2, 3),
    seed=st.integers(0, 1000),
)
def test_several_routers_together_do_not_overshoot(num_rows: int, num_others: int, num_routers: int, seed: int) -> None:
    world = crowded(num_rows, num_routers=num_routers, seed=seed)
    for index in range(num_others):
        world.add("w1", router=index % num_routers)
    world.reports = {name: world.load_of(name) for name in world.names}

    for _ in range(70):
        world.tick(grows=False)
        world.check_bounds()
        assert world.state("w1").gap_s <= (1 - MARGIN) * ITL_S + 1e-9

    num_needed = num_rows - 44
    assert len(world.moves) <= num_needed + num_routers
    assert world.state("w0").gap_s <= ITL_S or world.state("w1").gap_s > 0.75 * ITL_S


@QUICK
@given(num_ticks=st.integers(0, 8), seed=st.integers(0, 1000))
def test_router_that_dies_in_the_middle_leaves_nothing_stuck(num_ticks: int, seed: int) -> None:
    world = crowded(120, num_workers=3, num_routers=2, seed=seed)
    world.run(num_ticks, grows=False)

    world.kill(0)
    for _ in range(60):
        world.add("w0", router=1)
    world.run(130, grows=False)

    assert world.state("w0").gap_s <= ITL_S
    assert all(stream.order is None for stream in world.routers[1].streams.all())


@QUICK
@given(num_streams=st.integers(25, 31), seed=st.integers(0, 1000))
def test_worker_that_is_nearly_full_lets_some_go_whatever_is_known_of_its_steps(num_streams: int, seed: int) -> None:
    world = BalanceWorld(num_workers=2, num_blocks=700, model=UNKNOWN_STEP_TIME, seed=seed)
    for _ in range(num_streams):
        world.add("w0", num_tokens=400, itl_ms=None)  # 25 blocks
    world.reports = {name: world.load_of(name) for name in world.names}
    was_full = world.state("w0").usage >= 0.9

    world.run(60)

    assert (len(world.moves) > 0) == was_full
    assert {reason for *_, reason in world.moves} <= {MoveReason.KV}
    assert world.state("w0").usage < 0.9
    assert world.state("w1").usage <= 0.75


@QUICK
@given(seed=st.integers(0, 1000), num_rows=st.integers(100, 140))
def test_where_nobody_has_room_nothing_moves(seed: int, num_rows: int) -> None:
    world = BalanceWorld(num_workers=3, num_routers=2, seed=seed)
    for name in world.names:
        for index in range(num_rows // 2):
            world.add(name, router=index % 2)

    world.run(20, grows=False)

    assert world.moves == []


@QUICK
@given(seed=st.integers(0, 1000), num_routers=st.integers(1, 3))
def test_growing_streams_are_moved_a_bounded_number_of_times(seed: int, num_routers: int) -> None:
    world = crowded(70, num_workers=3, num_routers=num_routers, seed=seed)

    world.run(50)

    moved = [request_id for _, request_id, *_ in world.moves]
    assert max(moved.count(request_id) for request_id in set(moved)) <= WAITS.rebalance_max_moves
    assert len(moved) <= 3 * 70
    for request_id in set(moved):
        ticks = [tick for tick, moved_id, *_ in world.moves if moved_id == request_id]
        assert all(later - earlier >= 4 for earlier, later in itertools.pairwise(ticks))


def test_without_a_promise_or_a_model_no_gap_is_too_long() -> None:
    unpromised = BalanceWorld(num_workers=2)
    unknown = BalanceWorld(num_workers=2, model=UNKNOWN_STEP_TIME)
    doubtful = BalanceWorld(num_workers=2, model=replace(MODEL, error=0.9))
    for _ in range(80):
        unpromised.add("w0", itl_ms=None)
        unknown.add("w0")
        doubtful.add("w0")

    for world in (unpromised, unknown, doubtful):
        world.run(20, grows=False)
        assert world.moves == []


def test_what_has_just_come_ends_soon_or_was_moved_often_stays() -> None:
    world = BalanceWorld(num_workers=2)
    for index in range(60):
        stream = world.add("w0", max_tokens=20 if index % 4 == 0 else 5000)
        if index % 4 == 1:
            stream.since_s = world.now_s
        if index % 4 == 2:
            stream.num_moves = WAITS.rebalance_max_moves
    world.reports = {name: world.load_of(name) for name in world.names}

    world.tick(grows=False)

    assert {int(request_id[1:]) % 4 for _, request_id, *_ in world.moves} == {0}  # counted from 1: index 3


def test_short_streams_with_much_to_come_go_first() -> None:
    world = BalanceWorld(num_workers=2)
    for index in range(60):
        world.add("w0", num_tokens=100 if index < 4 else 300, max_tokens=5000)
    world.reports = {name: world.load_of(name) for name in world.names}

    world.tick(grows=False)

    assert {request_id for _, request_id, *_ in world.moves} == {"r1", "r2", "r3", "r4"}


@pytest.mark.parametrize("itl_ms", [20.0, 49.0])
def test_target_keeps_the_promise_of_whom_it_takes(itl_ms: float) -> None:
    world = BalanceWorld(num_workers=2)
    for _ in range(60):
        world.add("w0", itl_ms=itl_ms)
    for _ in range(14):
        world.add("w1", itl_ms=None)
    world.reports = {name: world.load_of(name) for name in world.names}

    world.run(40, grows=False)

    assert world.state("w1").gap_s <= max((1 - MARGIN) * itl_ms / 1000, 0.0218)
    assert (len(world.moves) > 0) == (itl_ms > 40)


@pytest.mark.parametrize(
    ("hosts", "is_full", "moves"),
    [(("a", "b"), False, True), (("a", "a"), False, False), (("", ""), False, True), (("a", "a"), True, True)],
    ids=["other host", "its cores", "own cores", "its blocks"],
)
def test_idle_worker_whose_cores_are_lent_takes_streams_only_for_its_blocks(
    hosts: tuple[str, str], is_full: bool, moves: bool
) -> None:
    num_rows = 10 if is_full else 60
    busy = WorkerState(
        replica_id="w0",
        num_rows=num_rows,
        num_context_tokens=300 * num_rows,
        num_requests=num_rows,
        num_blocks=10_000,
        num_used_blocks=9900 if is_full else 20 * num_rows,
        block_size=16,
        step_time=MODEL,
        lends_to=hosts[0],
    )
    idle = replace(
        busy, replica_id="w1", num_rows=0, num_context_tokens=0, num_requests=0, num_used_blocks=0, lends_to=hosts[1]
    )
    streams = [
        StreamState(
            request_id=f"r{number}", replica_id="w0", num_tokens=300, num_tokens_left=900, itl_s=ITL_S, may_move=True
        )
        for number in range(num_rows)
    ]

    planned = plan_moves(
        {"w0": busy, "w1": idle},
        streams,
        limits=MoveLimits(max_usage=0.9, num_moves=4, num_moves_a_worker=4),
        draw=lambda: 0.0,
    )

    assert bool(planned) == moves
