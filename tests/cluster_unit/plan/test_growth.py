"""Pools that cannot grow to their maximum on the available machines."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config.config import BatonConfig
from cluster.plan.growth import growth_warnings
from cluster.plan.inventory import Node


def machines(count: int, *, num_gpus: float = 0, **resources: float) -> list[Node]:
    return [
        Node(
            address=f"m{number}",
            num_cores=16,
            num_cpus=16.0,
            num_gpus=num_gpus,
            memory_bytes=1 << 34,
            resources=resources,
        )
        for number in range(count)
    ]


def warnings_of(nodes: list[Node], **keys: Any) -> list[str]:
    return list(growth_warnings(BatonConfig.model_validate(keys), nodes))


@pytest.mark.parametrize("nodes", [machines(1), machines(1, num_gpus=1), machines(5, num_gpus=1)])
def test_pool_that_can_become_as_large_as_it_may_is_nothing_to_warn_of(nodes: list[Node]) -> None:
    assert warnings_of(nodes, decode={"scaling": {"max_replicas": 4}}) == []


def test_pools_that_keep_their_number_are_nothing_to_warn_of() -> None:
    assert warnings_of(machines(1, num_gpus=1), decode_replicas=9) == []


def test_gpus_that_are_taken_too_early_are_told_with_what_would_help() -> None:
    half = {"num_gpus": 0.5}

    (warning,) = warnings_of(machines(1, num_gpus=1), prefill=half, decode={**half, "scaling": {"max_replicas": 4}})

    assert warning == (
        "decode.scaling.max_replicas is 4, but beside 1 prefill worker the one machine has room for 1 decode "
        "worker: more would wait for a machine, forever if Ray's autoscaler adds none; lower "
        "decode.scaling.max_replicas to 1, or set prefill.num_gpus to null and set decode.num_gpus to null, or "
        "add machines"
    )


def test_one_pool_s_key_is_enough_where_it_is() -> None:
    (warning,) = warnings_of(
        machines(1, num_gpus=1), prefill={"num_gpus": 0.1}, decode={"num_gpus": 0.5, "scaling": {"max_replicas": 4}}
    )

    assert "or set decode.num_gpus to null, or add machines" in warning


def test_too_few_machines_are_told_with_how_many_workers_they_have_room_for() -> None:
    (warning,) = warnings_of(machines(4, num_gpus=1), decode={"scaling": {"max_replicas": 8}})

    assert "the 4 machines have room for 3 decode workers" in warning
    assert warning.endswith("lower decode.scaling.max_replicas to 3, or add machines")


def test_pools_may_use_the_same_machines_one_after_the_other() -> None:
    scaling = {"scaling": {"max_replicas": 3}}

    assert warnings_of(machines(4, num_gpus=1), prefill=scaling, decode=scaling) == []


def test_limit_of_each_machine_is_one_of_the_reasons() -> None:
    (warning,) = warnings_of(machines(2), decode={"max_per_node": 1, "scaling": {"max_replicas": 3}})

    assert warning.endswith(
        "lower decode.scaling.max_replicas to 2, or set decode.max_per_node to null, or add machines"
    )


def test_what_must_be_there_and_finds_no_machine_is_a_problem_and_no_warning() -> None:
    assert warnings_of(machines(2, num_gpus=1), decode={"scaling": {"min_replicas": 2, "max_replicas": 3}}) == []
