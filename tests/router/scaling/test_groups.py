"""Which pools are sized together, for which work, and by which prices."""

from __future__ import annotations

import pytest

from engine.contract.messages import LoadReport
from engine.contract.promise import Promise
from engine.contract.step_time import StepTimeModel
from router.pool.replica import Replica
from router.scaling.group import Group, PoolState, groups_of
from router.scaling_rules import PoolBounds, ScalingRules
from router.settings import RolesMode, RouterSettings
from tests.support.router.balance_world import replica_of

BOUNDS = PoolBounds(least=1, most=8)
PROMISE = Promise(ttft_ms=1000.0, itl_ms=50.0)
LOCAL = 64


def groups(roles: RolesMode, *pools: str, following: tuple[str, ...] = ("prefill", "decode")) -> list[Group]:
    rules = ScalingRules(pools=dict.fromkeys(following, BOUNDS))
    settings = RouterSettings(roles=roles, scaling=rules, promise=PROMISE, local_prefill_tokens=LOCAL)
    return list(groups_of(settings, dict.fromkeys(pools, 2)))


def test_fixed_pools_for_one_kind_of_work_are_sized_each_for_itself() -> None:
    prompts, streams = groups("fixed", "prefill", "decode")

    assert (list(prompts.wanted), prompts.has_streams) == (["prefill"], False)
    assert (list(streams.wanted), streams.has_streams) == (["decode"], True)
    assert (prompts.over_tokens, streams.up_to_tokens) == (LOCAL, LOCAL), "decode computes what is nearly cached"
    assert [list(group.wanted) for group in groups("fixed", "prefill", "decode", following=("decode",))] == [["decode"]]


def test_elastic_pools_are_sized_together() -> None:
    (group,) = groups("elastic", "prefill", "decode")

    assert list(group.wanted) == ["prefill", "decode"]
    assert group.has_streams
    assert (group.over_tokens, group.up_to_tokens) == (0.0, float("inf"))


def test_a_pool_for_both_kinds_of_work_is_sized_with_those_for_one() -> None:
    (group,) = groups("fixed", "prefill", "decode", "mixed", following=("mixed",))

    assert list(group.wanted) == ["prefill", "decode", "mixed"]
    assert group.has_streams
    assert (group.over_tokens, group.up_to_tokens) == (0.0, float("inf"))


def worker_with(prompt_token_s: float, *, num_prompt_tokens: float, num_generated_tokens: float = 0.0) -> Replica:
    counters = {
        "num_scheduled_tokens": num_prompt_tokens + num_generated_tokens,
        "num_generated_tokens": num_generated_tokens,
    }
    model = StepTimeModel(base_s=10 * prompt_token_s, prompt_token_s=prompt_token_s, num_steps=100)
    return replica_of("worker", LoadReport(num_blocks=1000, step_time=model, counters=counters), now_s=0.0)


def test_first_prices_of_a_new_worker_hardly_count_beside_those_of_one_that_knows() -> None:
    known = worker_with(1e-3, num_prompt_tokens=100_000, num_generated_tokens=50_000)
    new = worker_with(1e-1, num_prompt_tokens=300, num_generated_tokens=70)

    predictor = PoolState(replicas=[known, new]).predictor(prompts=True, streams=True)

    assert predictor is not None
    assert predictor.step_time.prompt_token_s == pytest.approx(1e-3 + (1e-1 - 1e-3) * 300 / (300 + 8192))
    assert predictor.step_time.base_s == pytest.approx(1e-2 + (1.0 - 1e-2) * 70 / (70 + 1024))


def test_workers_that_know_their_prices_count_alike_however_long_they_run() -> None:
    workers = [worker_with(price, num_prompt_tokens=number) for price, number in ((1e-3, 10_000), (3e-3, 10_000_000))]

    predictor = PoolState(replicas=workers).predictor(prompts=True, streams=False)

    assert predictor is not None
    assert predictor.step_time.prompt_token_s == pytest.approx(2e-3)
