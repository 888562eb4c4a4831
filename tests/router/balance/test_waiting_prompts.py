"""Waiting prompts move to workers that would complete them clearly sooner, and to no others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.messages import GenerateRequest, LoadReport, SamplingParams
from engine.contract.promise import NO_PROMISE, Promise
from engine.contract.role import Work
from engine.contract.step_time import UNKNOWN_STEP_TIME, StepTimeModel
from engine.contract.token_ids import TokenIds
from router.balance.rebalancer import Rebalancer, queues_of
from router.balance.streams import LiveStream, LiveStreams, MoveReason
from router.balance.waiting_prompts import LEAST_GAIN_S, MARGIN, PromptQueue, WaitingPrompt, may_give, plan_prompt_moves
from router.pool.demand import Demand
from router.pool.replica import Replica
from router.pool.workers import WorkerPool
from router.report.counters import RouterCounters
from router.settings import RouterSettings
from tests.support.router.balance_world import BLOCK_SIZE, replica_of
from tests.support.router.fake_workers import FakeDecodePool, FakePrefillPool

MODEL = StepTimeModel(base_s=0.01, prompt_token_s=0.001, error=0.05, num_steps=1000)
ELASTIC = RouterSettings(roles="elastic")


def queue(
    num_tokens: float, *, num_late: float = 0.0, may_take: bool = True, model: StepTimeModel = MODEL
) -> PromptQueue:
    return PromptQueue(num_tokens=num_tokens, step_time=model, num_late_tokens=num_late, may_take=may_take)


def waiting(
    name: str, at: str, num_tokens: int = 500, *, left_s: float | None = None, since_s: float = 0.0
) -> WaitingPrompt:
    return WaitingPrompt(request_id=name, replica_id=at, num_tokens=num_tokens, left_s=left_s, since_s=since_s)


def planned(
    queues: Mapping[str, PromptQueue], *prompts: WaitingPrompt, num_moves: int = 8
) -> list[tuple[str, str, str]]:
    moves = plan_prompt_moves(queues, prompts, num_moves=num_moves)
    assert {move.reason for move in moves} <= {MoveReason.QUEUE}
    return [(move.request_id, move.source, move.target) for move in moves]


def test_a_prompt_goes_where_nothing_waits() -> None:
    queues = {"busy": queue(2000), "idle": queue(0), "half": queue(900)}

    assert planned(queues, waiting("a", "busy")) == [("a", "busy", "idle")]


def test_it_stays_where_others_would_end_it_hardly_sooner() -> None:
    assert planned({"busy": queue(700), "other": queue(200)}, waiting("a", "busy")) == []
    assert planned({"busy": queue(500), "idle": queue(0)}, waiting("a", "busy")) == [], "it is all that waits"


def test_late_ones_go_first_and_of_these_the_last_one() -> None:
    prompts = [
        waiting("first", "busy", since_s=1.0),
        waiting("late", "busy", left_s=-1.0, since_s=2.0),
        waiting("later", "busy", left_s=-1.0, since_s=3.0),
        waiting("last", "busy", since_s=4.0),
    ]
    queues = {"busy": queue(4000), "idle": queue(0)}

    assert planned(queues, *prompts, num_moves=1) == [("later", "busy", "idle")]
    assert [name for name, *_ in planned(queues, *prompts)] == ["later", "late", "last"]


def test_what_is_cached_where_it_waits_keeps_it_there() -> None:
    known = replace(waiting("a", "busy", 2000), cached_tokens={"busy": 1900})

    assert planned({"busy": queue(1500), "idle": queue(0)}, known) == []
    assert planned({"busy": queue(1500), "idle": queue(0)}, replace(known, cached_tokens={"idle": 1900})) == [
        ("a", "busy", "idle")
    ]


def test_those_that_are_in_time_where_they_are_stay() -> None:
    queues = {"busy": queue(2000), "idle": queue(0)}  # two seconds

    assert planned(queues, waiting("a", "busy", left_s=2.1)) == []
    assert planned(queues, waiting("a", "busy", left_s=1.9)) == [("a", "busy", "idle")]


def test_those_that_pass_the_late_ones_in_time_stay() -> None:
    """An idle worker is there for those who come, and for the late ones."""
    queues = {"busy": queue(3000, num_late=2500), "idle": queue(0)}

    assert planned(queues, waiting("in time", "busy", left_s=1.0)) == []
    assert planned(queues, waiting("late", "busy", left_s=-1.0)) == [("late", "busy", "idle")]
    nobody_late = {**queues, "busy": queue(3000)}
    assert planned(nobody_late, waiting("in time", "busy", left_s=1.0)) == [("in time", "busy", "idle")]


def test_late_ones_that_wait_elsewhere_are_passed_there() -> None:
    queues = {"busy": queue(3000), "passed": queue(2000, num_late=2000), "half": queue(800)}

    assert planned(queues, waiting("in time", "busy", left_s=1.0)) == [("in time", "busy", "passed")]
    assert planned(queues, waiting("late", "busy", left_s=-1.0)) == [("late", "busy", "half")]


def test_what_leaves_and_what_comes_counts_in_the_next_move() -> None:
    """A late prompt begins immediately if nothing waits there, because nothing can pass it."""
    queues = {"busy": queue(4000, num_late=1000), "idle": queue(0)}
    prompts = [waiting("late", "busy", 1000, left_s=-1.0), waiting("in time", "busy", 100, left_s=1.0)]

    assert planned(queues, *prompts) == [("late", "busy", "idle"), ("in time", "busy", "idle")]
    assert planned({**queues, "other": queue(200)}, *prompts)[1] == ("in time", "busy", "other")


def test_nobody_is_moved_to_who_lends_its_cores_or_is_not_known() -> None:
    queues = {"busy": queue(5000), "lends": queue(0, may_take=False), "new": queue(0, model=UNKNOWN_STEP_TIME)}

    assert planned(queues, waiting("a", "busy")) == []
    assert planned({**queues, "busy": queue(5000, model=UNKNOWN_STEP_TIME)}, waiting("a", "busy")) == []


NAMES = ("a", "b", "c", "d")
MAX_ROUNDS = 40
"""Twice the number of prompts: one that moved before a longer one may move back after it."""


@given(
    lengths=st.lists(
        st.tuples(st.sampled_from(NAMES), st.integers(1, 3000), st.sampled_from([None, -1.0, 0.5, 5.0])), max_size=20
    ),
    others=st.fixed_dictionaries({name: st.integers(0, 5000) for name in NAMES}),
    are_late=st.fixed_dictionaries({name: st.booleans() for name in NAMES}),
    num_moves=st.integers(0, 8),
)
def test_every_move_ends_its_prompt_sooner_and_they_come_to_rest(
    lengths: list[tuple[str, int, float | None]],
    others: dict[str, int],
    are_late: dict[str, bool],
    num_moves: int,
) -> None:
    prompts = {
        f"p{number}": waiting(f"p{number}", at, num_tokens, left_s=left_s, since_s=number)
        for number, (at, num_tokens, left_s) in enumerate(lengths)
    }
    tokens = {
        name: others[name] + sum(prompt.num_tokens for prompt in prompts.values() if prompt.replica_id == name)
        for name in NAMES
    }

    for _ in range(MAX_ROUNDS):
        late = {name: others[name] if are_late[name] else 0 for name in NAMES}
        for prompt in prompts.values():
            late[prompt.replica_id] += prompt.num_tokens if prompt.is_late else 0
        queues = {name: queue(number, num_late=late[name]) for name, number in tokens.items()}
        moves = planned(queues, *prompts.values(), num_moves=num_moves)
        assert len(moves) == len({name for name, *_ in moves}) <= num_moves
        for name, source, target in moves:
            num_tokens = prompts[name].num_tokens
            assert prompts[name].replica_id == source != target
            passed = late if prompts[name].is_in_time else dict.fromkeys(NAMES, 0)
            assert (tokens[source] - passed[source]) * MODEL.prompt_token_s >= (
                MARGIN * (tokens[target] - passed[target] + num_tokens) * MODEL.prompt_token_s + LEAST_GAIN_S
            )
            late[source] -= num_tokens if prompts[name].is_late else 0
            tokens[source] -= num_tokens
            tokens[target] += num_tokens
            prompts[name] = replace(prompts[name], replica_id=target)
        if not moves:
            return
    raise AssertionError(f"prompts still move after {MAX_ROUNDS} rounds")


@given(
    tokens=st.dictionaries(st.sampled_from(NAMES), st.integers(0, 5000), min_size=1),
    late_shares=st.fixed_dictionaries({name: st.sampled_from([0.0, 0.5, 1.0]) for name in NAMES}),
    takers=st.sets(st.sampled_from(NAMES)),
    num_tokens=st.integers(1, 3000),
    left_s=st.sampled_from([None, -1.0, 0.5, 5.0]),
    cached=st.dictionaries(st.sampled_from(NAMES), st.integers(0, 3000)),
)
def test_no_prompt_would_leave_a_worker_that_may_give_none(
    tokens: dict[str, int],
    late_shares: dict[str, float],
    takers: set[str],
    num_tokens: int,
    left_s: float | None,
    cached: dict[str, int],
) -> None:
    queues = {
        name: queue(number, num_late=number * late_shares[name], may_take=name in takers)
        for name, number in tokens.items()
    }
    for name in NAMES:
        prompt = replace(waiting("p", name, num_tokens, left_s=left_s), cached_tokens=cached)
        if planned(queues, prompt):
            assert may_give(queues, {name: num_tokens}) == {name}


# ---- what a router knows of them


class Known:
    """Workers by their reports."""

    def __init__(self, loads: Mapping[str, LoadReport]) -> None:
        self.workers: WorkerPool = FakeDecodePool(prefill=FakePrefillPool())
        self.replicas = [replica_of(name, load, now_s=0.0) for name, load in loads.items()]
        self.cached: dict[str, int] = {}
        self.num_asked = 0

    def age_s(self, replica: Replica) -> float:
        return 0.0

    def that_take(self, work: Work) -> Sequence[Replica]:
        return self.replicas

    def cached_tokens(self, demand: Demand) -> Mapping[str, int]:
        self.num_asked += 1
        return self.cached


BUSY = LoadReport(num_blocks=100, num_free_blocks=90, num_running=2, queued_prefill_tokens=4000, step_time=MODEL)
IDLE = LoadReport(num_blocks=100, num_free_blocks=100, step_time=MODEL)


def enter(
    streams: LiveStreams, name: str, at: str, *, has_prompt: bool = True, first_due_s: float = math.inf
) -> LiveStream:
    request = GenerateRequest(
        request_id=name,
        prompt_token_ids=TokenIds.of([1] * 10 * BLOCK_SIZE),
        sampling=SamplingParams(max_tokens=10),
        promise=Promise(ttft_ms=5000.0) if first_due_s < math.inf else NO_PROMISE,
    )
    prompt = Demand(request) if has_prompt else None
    return streams.enter(request, [], replica_id=at, num_moves=0, prompt=prompt, first_due_s=first_due_s)


def rebalancer(known: Known, streams: LiveStreams, settings: RouterSettings = ELASTIC) -> Rebalancer:
    return Rebalancer(known, streams, settings=settings, counters=RouterCounters(), clock=lambda: 100.0)


def test_the_router_tells_prompts_to_leave_and_nobody_else() -> None:
    streams = LiveStreams(clock=lambda: 99.0)
    prompt = enter(streams, "prompt", "busy")
    enter(streams, "reads its KV", "busy", has_prompt=False)
    enter(streams, "has tokens", "busy").output_token_ids = [1]
    enter(streams, "was moved often", "busy").num_moves = ELASTIC.rebalance_max_moves
    looking = rebalancer(Known({"busy": BUSY, "idle": IDLE}), streams)

    assert looking.look() == {"busy": [prompt]}
    assert prompt.order is not None
    assert (prompt.order.target, prompt.order.reason) == ("idle", MoveReason.QUEUE)
    assert looking.look() == {}, "it is on its way"


def test_no_prompt_is_looked_at_where_all_workers_are_equally_far_behind() -> None:
    """In a flood each look took longer the more prompts and workers there were: a quarter of a second with 2,000 at
    200, twice a second, in which no stream of the router got a token.
    """
    streams = LiveStreams(clock=lambda: 99.0)
    known = Known({f"busy {number}": BUSY for number in range(10)})
    for number in range(200):
        enter(streams, f"waits {number}", f"busy {number % 10}")

    assert rebalancer(known, streams).look() == {}
    assert known.num_asked == 0


def test_promises_that_are_lost_are_seen_by_the_time_that_passed() -> None:
    streams = LiveStreams(clock=lambda: 99.0)
    late = enter(streams, "late", "busy", first_due_s=99.5)
    enter(streams, "soon late", "busy", first_due_s=103.0).since_s = 99.5
    in_time = enter(streams, "in time", "busy", first_due_s=110.0)
    settings = replace(ELASTIC, rebalance_max_in_flight=1)

    assert rebalancer(Known({"busy": BUSY, "idle": IDLE}), streams, settings).look() == {"busy": [late]}
    rebalancer(Known({"busy": BUSY, "idle": IDLE}), streams).look()
    assert in_time.order is None


def test_a_prompt_that_had_begun_is_not_told_again_and_leaves_room_for_other_moves() -> None:
    now_s = 100.0
    streams = LiveStreams(clock=lambda: now_s)
    begun = enter(streams, "begun", "busy")
    settings, counters = replace(ELASTIC, rebalance_max_in_flight=1), RouterCounters()
    known = Known({"busy": BUSY, "idle": IDLE})
    looking = Rebalancer(known, streams, settings=settings, counters=counters, clock=lambda: now_s)
    assert looking.look() == {"busy": [begun]}
    waits = enter(streams, "waits", "busy")

    assert looking.look() == {}, "one at a time"
    now_s += settings.stale_after_s
    assert looking.look() == {"busy": [waits]}
    assert begun.order is None
    assert counters.num_failed_moves == 0


@pytest.mark.parametrize("settings", [RouterSettings(roles="fixed"), replace(ELASTIC, move_waiting_prompts=False)])
def test_with_fixed_roles_or_when_told_not_to_none_is_moved(settings: RouterSettings) -> None:
    streams = LiveStreams(clock=lambda: 99.0)
    enter(streams, "prompt", "busy")

    assert rebalancer(Known({"busy": BUSY, "idle": IDLE}), streams, settings).look() == {}


def test_an_idle_worker_with_whose_cores_another_one_computes_takes_none() -> None:
    known = Known({"busy": BUSY, "lends": IDLE, "elsewhere": IDLE})
    for replica, host in zip(known.replicas, ("one", "one", "two"), strict=True):
        assert replica.info is not None
        replica.info = replace(replica.info, node_ip=host, num_host_cores=2, borrows_cores=True)

    assert {name for name, queue in queues_of(known.replicas).items() if queue.may_take} == {"busy", "elsewhere"}
