"""One router decides for all, orders the needed sizes, and reports the reason; its successor continues where it
ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from engine.contract.messages import LoadReport
from engine.contract.promise import Promise
from engine.contract.step_time import StepTimeModel
from router.pool.replica import Replica
from router.pool.workers import WorkerUnavailableError
from router.report.arrivals import ArrivalSample
from router.report.counters import RouterCounters
from router.report.router_report import ScalingNote
from router.scaling.control import ScalingControl
from router.scaling_rules import PoolBounds, ScalingRules
from router.settings import RolesMode, RouterSettings
from tests.support.router.balance_world import replica_of

MODEL = StepTimeModel(base_s=0.01, row_s=1e-4, context_token_s=1e-6, prompt_token_s=1e-3, error=0.1, num_steps=1000)
COUNTERS = {"num_scheduled_tokens": 10_000.0, "num_generated_tokens": 1000.0}
START_S = 10.0


@dataclass(slots=True)
class FakePool:
    """The workers of a role; what is ordered comes ``START_S`` later, what is too much is gone at once."""

    world: World
    role: str
    number: int = 1
    starts_s: list[float] = field(default_factory=list)
    queued_tokens: int = 0
    model: StepTimeModel = MODEL

    @property
    def replicas(self) -> tuple[Replica, ...]:
        load = LoadReport(
            num_blocks=1000,
            num_free_blocks=1000,
            step_time=self.model,
            counters=COUNTERS,
            queued_prefill_tokens=self.queued_tokens,
        )
        found = [replica_of(f"{self.role}-{index}", load, now_s=self.world.now_s) for index in range(self.number)]
        for replica in found:
            replica.role = self.role
        return tuple(found)


@dataclass(slots=True)
class World:
    """A steady stream of prompts of 300 tokens, answered with 20."""

    rate: float = 1.0
    roles: RolesMode = "fixed"
    rules: ScalingRules = field(
        default_factory=lambda: ScalingRules(
            pools={"prefill": PoolBounds(least=1, most=6)}, hold_s=60.0, start_s=START_S
        )
    )
    now_s: float = 1000.0
    live: list[str] = field(default_factory=lambda: ["a"])
    notes: list[ScalingNote] = field(default_factory=list)
    orders: list[tuple[str, int]] = field(default_factory=list)
    is_deaf: bool = False
    pools: dict[str, FakePool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pools = {role: FakePool(self, role) for role in ("prefill", "decode")}

    def control(self, own_id: str) -> ScalingControl:
        settings = RouterSettings(promise=Promise(ttft_ms=2000.0, itl_ms=100.0), roles=self.roles, scaling=self.rules)
        control = ScalingControl(
            tuple(self.pools.values()),  # type: ignore[arg-type]  # of a pool nothing else is looked at
            view=self,
            own_id=own_id,
            settings=settings,
            counters=RouterCounters(),
            clock=lambda: self.now_s,
            wall_clock=lambda: self.now_s,
        )
        control.orders = self
        return control

    def live_router_ids(self) -> Sequence[str]:
        return self.live

    def arrivals(self) -> Sequence[ArrivalSample]:
        number = round(60 * self.rate) if self.rate else 0
        rows = tuple((60.0 - (index + 0.5) / self.rate, 300, 0, 20) for index in range(number))
        return [ArrivalSample(window_s=60.0, arrivals=rows)]

    def note_scaling(self, note: ScalingNote) -> None:
        self.notes.append(note)

    def last_scaling(self, role: str) -> ScalingNote | None:
        return next((note for note in reversed(self.notes) if note.role == role), None)

    async def want(self, role: str, number: int) -> None:
        if self.is_deaf:
            raise WorkerUnavailableError(replica_id=f"{role}-0", reason="it is silent")
        self.orders.append((role, number))
        pool = self.pools[role]
        pool.starts_s += [self.now_s + START_S] * (number - pool.number - len(pool.starts_s))
        pool.number = min(pool.number, number)

    async def pass_time(self, *controls: ScalingControl, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            for pool in self.pools.values():
                pool.number += sum(at_s <= self.now_s for at_s in pool.starts_s)
                pool.starts_s = [at_s for at_s in pool.starts_s if at_s > self.now_s]
            for control in controls:
                await control.look()


def numbers(world: World) -> list[tuple[str, int]]:
    return [(note.role, note.wanted) for note in world.notes]


async def test_pool_grows_at_once_and_shrinks_behind_the_hold() -> None:
    world = World(rate=0.5)
    control = world.control("a")
    await world.pass_time(control, seconds=5)
    assert numbers(world) == []

    world.rate = 5.0
    await world.pass_time(control, seconds=1)
    ((role, grown),) = numbers(world)
    assert (role, grown) == ("prefill", 2) or grown > 2
    assert "requests/s are expected" in world.notes[0].reason

    world.rate = 0.5
    await world.pass_time(control, seconds=59)
    assert len(world.notes) == 1
    await world.pass_time(control, seconds=10)
    assert numbers(world)[1:] == [("prefill", 1)]
    assert "would have been enough, even for" in world.notes[1].reason
    assert world.pools["prefill"].number == 1


@pytest.mark.parametrize("rate", [0.3, 1.0, 2.9, 3.0, 3.1, 6.0])
async def test_steady_load_changes_a_pool_at_most_once(rate: float) -> None:
    world = World(rate=rate)
    control = world.control("a")

    await world.pass_time(control, seconds=300)

    assert len(world.notes) <= 1


async def test_only_the_first_router_orders() -> None:
    world = World(rate=8.0, live=["a", "b"])
    first, second = world.control("a"), world.control("b")

    await world.pass_time(second, seconds=5)
    assert world.orders == []
    await world.pass_time(first, seconds=1)
    assert world.orders == [("prefill", world.notes[0].wanted)]


async def test_the_next_leader_goes_on_where_the_last_one_ended() -> None:
    world = World(rate=5.0, live=["a", "b"])
    first, second = world.control("a"), world.control("b")
    await world.pass_time(first, second, seconds=30)
    grown = world.pools["prefill"].number

    world.live = ["b"]
    await world.pass_time(second, seconds=200)

    assert len(world.notes) == 1
    assert world.pools["prefill"].number == grown > 1


async def test_what_waits_brings_workers_to_catch_up() -> None:
    world = World(rate=1.0)
    control = world.control("a")
    world.pools["prefill"].queued_tokens = 60_000

    await world.pass_time(control, seconds=1)

    assert numbers(world) == [("prefill", 6)]
    assert "catch up" in world.notes[0].reason


async def test_nothing_is_ordered_before_steps_can_be_predicted() -> None:
    world = World(rate=8.0)
    world.pools["prefill"].model = StepTimeModel()

    await world.pass_time(world.control("a"), seconds=5)

    assert (world.notes, world.orders) == ([], [])


async def test_workers_that_come_after_the_first_look_stay() -> None:
    """A pool that was deployed with three, of which one was ready first."""
    world = World(rate=0.5)
    control = world.control("a")
    await world.pass_time(control, seconds=3)
    world.pools["prefill"].number = 3

    await world.pass_time(control, seconds=30)
    assert (world.notes, world.orders) == ([], [])
    await world.pass_time(control, seconds=60)
    assert numbers(world) == [("prefill", 1)]


async def test_pool_to_which_nothing_ever_came_shrinks_to_its_least() -> None:
    world = World(rate=0.0)
    world.pools["prefill"].number = 3
    world.pools["prefill"].model = StepTimeModel()

    await world.pass_time(world.control("a"), seconds=70)

    assert numbers(world) == [("prefill", 1)]
    assert "no requests came" in world.notes[0].reason


async def test_order_that_was_not_heard_is_given_again() -> None:
    world = World(rate=8.0, is_deaf=True)
    control = world.control("a")
    await world.pass_time(control, seconds=3)
    assert (len(world.notes), world.orders) == (1, [])

    world.is_deaf = False
    await world.pass_time(control, seconds=1)

    assert world.orders == [("prefill", world.notes[0].wanted)]


async def test_pools_of_any_work_are_sized_together_and_grow_where_most_is_lacking() -> None:
    bounds = PoolBounds(least=1, most=4)
    rules = ScalingRules(pools={"prefill": bounds, "decode": bounds}, hold_s=60.0, start_s=START_S)
    world = World(rate=8.0, roles="elastic", rules=rules)

    await world.pass_time(world.control("a"), seconds=1)

    wanted = {note.role: note.wanted for note in world.notes}
    assert wanted["prefill"] > wanted.get("decode", 1)


async def test_pool_that_keeps_its_number_is_counted_and_left_alone() -> None:
    rules = ScalingRules(pools={"prefill": PoolBounds(least=1, most=4)}, hold_s=60.0, start_s=START_S)
    world = World(rate=8.0, roles="elastic", rules=rules)
    world.pools["decode"].number = 2

    await world.pass_time(world.control("a"), seconds=1)

    assert {role for role, _ in world.orders} == {"prefill"}
    assert 1 < world.notes[0].wanted <= 4


async def test_starts_that_were_seen_replace_what_was_configured() -> None:
    world = World(rate=0.5)
    control = world.control("a")
    await world.pass_time(control, seconds=1)
    world.rate = 5.0
    await world.pass_time(control, seconds=30)
    world.rate = 12.0
    await world.pass_time(control, seconds=1)

    assert "expected in 11 s" in world.notes[-1].reason
