"""How many workers a pool wants, by its own signal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from cluster.config.config import BatonConfig
from cluster.config.scaling import ScalingSection
from cluster.plan.placement import logical_cpus
from cluster.serve.autoscale import autoscaling_config, wanted_replicas
from engine.contract.messages import LoadReport
from router.roles import ROLES

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
