"""The number of workers that a pool wants, by its own signal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from cluster.config.config import BatonConfig
from cluster.config.scaling import ScalingSection
from cluster.plan.placement import logical_cpus
from cluster.serve.autoscale import autoscaling_config, ordered_replicas, wanted_replicas
from cluster.serve.handles import ServeSizes
from engine.contract.messages import LoadReport
from router.pool.workers import WorkerUnavailableError
from router.roles import ROLES
from router.scaling_rules import PoolBounds, ScalingRules
from tests.support.clock import ManualClock

SCALING = ScalingSection(min_replicas=1, max_replicas=4, target_queued_tokens=1000, target_kv_usage=0.5)


def wanted(*loads: float, target: int = 2) -> int:
    metrics = {"load": {f"replica-{number}": load for number, load in enumerate(loads)}} if loads else {}
    context: Any = SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=target)
    return wanted_replicas(context)[0]


@pytest.mark.parametrize(
    ("loads", "number"),
    [((0.0,), 1), ((0.9,), 1), ((1.0, 1.0), 2), ((1.0, 1.1), 3), ((0.2, 0.2, 0.2), 1), ((4.0,), 4), ((0.5, 0.5), 1)],
)
def test_as_many_as_share_the_load(loads: tuple[float, ...], number: int) -> None:
    assert wanted(*loads) == number


def test_without_any_report_nothing_changes() -> None:
    assert wanted(target=3) == 3


def test_each_role_has_its_own_signal() -> None:
    load = LoadReport(num_blocks=100, num_free_blocks=75, queued_prefill_tokens=1500)

    assert SCALING.load_of(ROLES["prefill"], load) == 1.5
    assert SCALING.load_of(ROLES["decode"], load) == 0.5


def test_one_stuck_queue_does_not_ask_for_the_whole_cluster() -> None:
    assert SCALING.load_of(ROLES["prefill"], LoadReport(queued_prefill_tokens=10**9)) == 4.0


@pytest.mark.parametrize(("given", "initial"), [(1, 1), (3, 3), (9, 4)])
def test_pool_begins_with_what_it_was_given_within_its_bounds(given: int, initial: int) -> None:
    config = autoscaling_config(SCALING, num_replicas=given)

    assert (config.min_replicas, config.max_replicas, config.initial_replicas) == (1, 4, initial)
    assert (config.upscale_delay_s, config.downscale_delay_s) == (5.0, 120.0)


def test_bounds_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"min_replicas \(3\) is more than max_replicas \(2\)"):
        BatonConfig.model_validate({"decode": {"scaling": {"min_replicas": 3, "max_replicas": 2}}})


def test_ray_gets_room_for_the_most_workers() -> None:
    small = BatonConfig()
    large = BatonConfig.model_validate({"decode": {"num_cpus": 1, "scaling": {"max_replicas": 9}}})

    assert logical_cpus(large, num_cores=2) >= 9 > logical_cpus(small, num_cores=2)


BY_PROMISE = {"by": "promise", "max_replicas": 4}


def _series(value: float) -> list[SimpleNamespace]:
    """The answers of a replica that Serve kept; the last one counts."""
    return [SimpleNamespace(value=0.0), SimpleNamespace(value=value)]


def ordered(told: dict[str, tuple[float, float]], *, target: int = 2) -> int:
    """``told``: to how many replicas, and when, a replica was told that there should be."""
    metrics = {
        "ordered": {name: _series(number) for name, (number, _) in told.items()},
        "ordered_at_s": {name: _series(at_s) for name, (_, at_s) in told.items()},
    }
    context: Any = SimpleNamespace(raw_metrics=metrics, target_num_replicas=target)
    return ordered_replicas(context)[0]


def test_the_newest_order_that_any_replica_was_told_counts() -> None:
    assert ordered({"one": (3.0, 10.0), "two": (1.0, 20.0), "three": (4.0, 15.0)}) == 1


def test_without_any_order_nothing_changes() -> None:
    assert ordered({}, target=3) == 3


def test_what_a_router_ordered_is_not_delayed_again() -> None:
    config = autoscaling_config(ScalingSection(by="promise", min_replicas=2, max_replicas=4), num_replicas=1)

    assert (config.min_replicas, config.max_replicas, config.initial_replicas) == (2, 4, 2)
    assert (config.upscale_delay_s, config.downscale_delay_s) == (0.0, 0.0)


def test_rules_of_pools_that_follow_the_promises_reach_the_routers() -> None:
    section = {**BY_PROMISE, "min_replicas": 2, "target": 0.95, "window_s": 30, "start_s": 5, "down_delay_s": 60}
    config = BatonConfig.model_validate({"slo": {"itl_ms": 50}, "decode": {"scaling": section}})

    assert config.router_settings().scaling == ScalingRules(
        pools={"decode": PoolBounds(least=2, most=4)}, target=0.95, window_s=30.0, hold_s=60.0, start_s=5.0
    )
    assert BatonConfig().router_settings().scaling is None


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"decode": BY_PROMISE}, "no latency is promised: set slo.ttft_ms and slo.itl_ms"),
        ({"decode": BY_PROMISE, "slo": {"ttft_ms": 500}}, "slo.itl_ms, which its workers should keep, is not set"),
        ({"prefill": BY_PROMISE, "slo": {"itl_ms": 50}}, "slo.ttft_ms, which its workers should keep, is not set"),
        (
            {"decode": {**BY_PROMISE, "target_kv_usage": 0.5}, "slo": {"itl_ms": 50}},
            "target_kv_usage only applies to `by: load`, but by is 'promise'",
        ),
        ({"decode": {"max_replicas": 2, "target": 0.9}}, "target only applies to `by: promise`, but by is 'load'"),
        (
            {"prefill": BY_PROMISE, "decode": {"max_replicas": 4}, "slo": {"ttft_ms": 500}, "roles": "elastic"},
            "with roles elastic all workers are sized together",
        ),
        (
            {"prefill": BY_PROMISE, "decode": {**BY_PROMISE, "target": 0.9}, "slo": {"ttft_ms": 500, "itl_ms": 50}},
            "prefill.scaling.target .0.99. and decode.scaling.target .0.9. differ",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(values: dict[str, Any], text: str) -> None:
    pools = {pool: {"scaling": values[pool]} for pool in ("prefill", "decode") if pool in values}

    with pytest.raises(ValidationError, match=text):
        BatonConfig.model_validate({"roles": "fixed", **values, **pools})


class ToldReplicas:
    """``Caller``: the replicas of a pool, and what they were told. Those that are silent do not answer."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.silent: set[str] = set()
        self.told: list[tuple[str, int]] = []

    def replica_ids(self) -> list[str]:
        return self.names

    async def call(self, replica_id: str, method: str, *args: object, timeout_s: float) -> None:
        if replica_id in self.silent:
            raise WorkerUnavailableError(replica_id=replica_id, reason="it is silent")
        assert method == "want"
        self.told.append((replica_id, int(str(args[0]))))


async def test_replicas_are_told_once_and_those_that_come_later_too() -> None:
    replicas, clock = ToldReplicas("one"), ManualClock()
    sizes = ServeSizes({"decode": replicas}, timeout_s=1.0, clock=clock)  # type: ignore[dict-item]

    for _ in range(3):
        await sizes.want("decode", 2)
    replicas.names.append("two")
    await sizes.want("decode", 2)
    assert replicas.told == [("one", 2), ("two", 2)]

    await sizes.want("decode", 3)
    assert replicas.told[2:] == [("one", 3), ("two", 3)]
    clock.advance(60.0)
    await sizes.want("decode", 3)
    assert replicas.told[4:] == [("one", 3), ("two", 3)]


async def test_silent_replica_does_not_keep_others_from_being_told() -> None:
    replicas = ToldReplicas("one", "two")
    replicas.silent.add("one")
    sizes = ServeSizes({"decode": replicas}, timeout_s=1.0)  # type: ignore[dict-item]

    with pytest.raises(WorkerUnavailableError):
        await sizes.want("decode", 2)
    replicas.silent.clear()
    await sizes.want("decode", 2)

    assert replicas.told == [("two", 2), ("one", 2)]
