"""Workers divide the work while bursts of prompts come and go, all routers alike, and stop when that brings nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.messages import LoadReport
from engine.contract.role import Work
from engine.contract.step_time import UNKNOWN_STEP_TIME, StepTimeModel
from router.balance.division import CALM, PEAK, WINDOW_S, DivisionPolicy, WorkerLoad
from router.balance.leaning_control import LeaningControl
from router.balance.leanings import LeaningGoals
from router.balance.rebalancer import queues_of
from router.pool.replica import Replica
from router.report.counters import RouterCounters
from router.settings import RouterSettings
from tests.router.balance.test_leanings import LeaningWorld
from tests.support.router.balance_world import replica_of

GOALS = LeaningGoals(ttft_s=2.0, itl_s=0.1, max_usage=0.9)
TOKEN_S = 1e-3
MODEL = StepTimeModel(base_s=0.015, row_s=0.004, prompt_token_s=TOKEN_S, error=0.05, num_steps=1000)
TICK_S = 0.5
BURST = int(GOALS.ttft_s / TOKEN_S)
"""Prompt tokens at each worker that take as long as a first token may."""


def worker(
    name: str, *, num_streams: int = 1, num_queued_tokens: int = 0, order: int = 0, **others: object
) -> WorkerLoad:
    return WorkerLoad(
        replica_id=name,
        num_streams=num_streams,
        num_context_tokens=0,
        num_queued_tokens=num_queued_tokens,
        kv_usage=0.02,
        step_time=MODEL,
        order=order,
        **others,  # type: ignore[arg-type]
    )


def fleet(number: int = 16, **values: object) -> list[WorkerLoad]:
    return [replace(worker(f"w{at}", order=at), **values) for at in range(number)]  # type: ignore[arg-type]


def divided(policy: DivisionPolicy, workers: list[WorkerLoad], now_s: float) -> set[str]:
    """The workers that only generate."""
    parts = policy.look(workers, now_s)
    assert not parts or set(parts) == {item.replica_id for item in workers}
    return {name for name, work in parts.items() if work is Work.STREAM}


def after_a_calm_time(workers: list[WorkerLoad]) -> set[str]:
    policy = DivisionPolicy(goals=GOALS)
    assert not divided(policy, [replace(item, num_queued_tokens=0) for item in workers], 0.0)
    return divided(policy, workers, TICK_S)


def test_work_is_divided_in_a_burst_and_until_bursts_have_ended() -> None:
    policy, now_s = DivisionPolicy(goals=GOALS), 0.0
    assert not divided(policy, fleet(), now_s)

    for _ in range(3):  # bursts
        now_s += TICK_S
        assert divided(policy, fleet(num_queued_tokens=BURST), now_s) == {"w0", "w1"}
        for _ in range(8):
            now_s += TICK_S
            assert divided(policy, fleet(), now_s) == {"w0", "w1"}
    now_s += WINDOW_S

    assert not divided(policy, fleet(), now_s)


@pytest.mark.parametrize(
    ("why", "workers"),
    [
        ("nothing waits for long", fleet(num_queued_tokens=int(0.9 * PEAK * BURST))),
        ("streams need most workers", fleet(num_queued_tokens=BURST, num_streams=12)),
        ("their KV fills most workers", fleet(num_queued_tokens=BURST, kv_usage=0.5)),
        ("too few workers to gain anything", fleet(4, num_queued_tokens=BURST)),
        ("no step leaves room in a gap", fleet(num_queued_tokens=BURST, step_time=replace(MODEL, base_s=0.09))),
        ("nothing is known of their steps", fleet(num_queued_tokens=BURST, step_time=UNKNOWN_STEP_TIME)),
        ("idle workers lend their cores", fleet(num_queued_tokens=BURST, shares_cores=True)),
        ("there are none", []),
    ],
)
def test_work_is_not_divided(why: str, workers: list[WorkerLoad]) -> None:
    assert not after_a_calm_time(workers), why


def test_work_is_not_divided_where_prompts_always_wait() -> None:
    policy, behind = DivisionPolicy(goals=GOALS), fleet(num_queued_tokens=int(1.1 * CALM * BURST))

    for tick in range(40):
        assert not divided(policy, fleet(num_queued_tokens=BURST) if tick % 8 == 0 else behind, tick * TICK_S)


def test_as_many_workers_generate_as_the_streams_of_the_peak_need() -> None:
    policy = DivisionPolicy(goals=GOALS)
    first, *others = fleet(24, num_streams=0)
    divided(policy, [first, *others], 0.0)
    burst = [replace(item, num_queued_tokens=BURST) for item in others]
    numbers = [
        len(divided(policy, [replace(first, num_streams=count), *burst], 1.0 + at))
        for at, count in enumerate((11, 12, 23, 11))
    ]

    # 0.6 of 100 ms less 15 ms leave room for 11 rows of 4 ms.
    assert numbers == [1, 2, 3, 3]


workers_of_any_load = st.lists(
    st.builds(
        worker,
        name=st.uuids().map(str),
        num_streams=st.integers(0, 30),
        num_queued_tokens=st.integers(0, 2 * BURST),
        order=st.integers(0, 2**32 - 1),
        leans_to_prompts=st.sampled_from([0.0, 0.5, 1.0]),
    ),
    max_size=40,
    unique_by=(lambda item: item.replica_id, lambda item: item.order),
)


@given(workers=workers_of_any_load, data=st.data())
def test_every_router_divides_alike_and_by_leaning(workers: list[WorkerLoad], data: st.DataObject) -> None:
    found = after_a_calm_time(workers)

    assert after_a_calm_time(data.draw(st.permutations(workers))) == found
    assert not found or len(found) < len(workers)
    rank = {item.replica_id: (item.leans_to_prompts, item.order) for item in workers}
    others = rank.keys() - found
    assert all(rank[name] < rank[other] for name in found for other in others)


class DividedWorld(LeaningWorld):
    """Always the same replicas, so that what a router notes on them stays."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.known = [replica_of(f"w{at}", self.report(), now_s=self.now_s) for at in range(16)]

    @property
    def replicas(self) -> list[Replica]:
        return self.known

    def report(self, **values: object) -> LoadReport:
        load = LoadReport(num_blocks=99, num_free_blocks=99, leaning="decode", step_time=MODEL)
        return replace(load, **values)  # type: ignore[arg-type]

    async def see(self, **values: object) -> None:
        self.now_s += TICK_S
        for replica in self.known:
            replica.report(self.report(**values), self.now_s)
        for control in self.controls.values():
            await control.look()

    def keep_to(self, work: Work | None) -> list[Replica]:
        return [item for item in self.known if item.keeps_to is work]


async def test_a_router_has_its_workers_keep_to_one_kind_and_lets_those_that_leave_go() -> None:
    world = DividedWorld(leanings={})
    await world.see()
    assert len(world.keep_to(None)) == 16

    await world.see(queued_prefill_tokens=BURST)
    generating = world.keep_to(Work.STREAM)
    assert (len(generating), len(world.keep_to(Work.PROMPT))) == (1, 15)
    leaving = generating[0]
    leaving.report(world.report(is_draining=True), world.now_s)
    for control in world.controls.values():
        await control.look()
    assert leaving.keeps_to is None
    assert len(world.keep_to(Work.STREAM)) == 1, "another one generates instead"

    for _ in range(30):
        await world.see()
    assert len(world.keep_to(None)) == 16
    assert world.counters["r0"].num_divisions == 1


async def test_leanings_that_are_left_alone_divide_nothing() -> None:
    world = DividedWorld(leanings={})
    control = LeaningControl(
        world,
        world,
        view=world,
        own_id="r0",
        settings=RouterSettings(adapt_leanings=False),
        counters=RouterCounters(),
        goals=GOALS,
    )

    control.start()

    assert control._looking is None


def test_waiting_prompts_are_not_moved_to_a_worker_that_keeps_to_streams() -> None:
    replicas = [replica_of(name, LoadReport(num_blocks=9, step_time=MODEL), now_s=0.0) for name in "abc"]
    for replica, work in zip(replicas, (Work.STREAM, Work.PROMPT, None), strict=True):
        replica.keep_to(work)

    assert [queue.may_take for queue in queues_of(replicas).values()] == [False, True, True]
