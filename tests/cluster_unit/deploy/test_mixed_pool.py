"""A pool of mixed workers: it is there where its number says so, and workers of the other pools know of it."""

from __future__ import annotations

import io
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console

from cluster.commands.deploy import deploy
from cluster.config.config import BatonConfig
from cluster.config.served_model import served_model
from cluster.plan.inventory import Node
from cluster.plan.placement import place
from cluster.plan.plan import make_plan
from cluster.serve.graph import build_graph
from cluster.serve.server_info import effective
from cluster.serve.workers import WorkerSettings
from tests.support.cluster.fake_ray import ADDRESS, FakeRay

MACHINE = Node(address="a", num_cores=8, num_cpus=8.0, memory_bytes=1 << 34)


def config_of(**keys: Any) -> BatonConfig:
    return BatonConfig.model_validate(keys)


def workers_of(config: BatonConfig) -> dict[str, WorkerSettings]:
    """The settings that the workers of each pool are deployed with."""
    model = served_model(config)
    graph = build_graph(config, model, place(config, [MACHINE]))
    bound = graph._bound_deployment.init_kwargs
    return {pool: application._bound_deployment.init_args[0] for pool, application in bound.items()}


def run_deploy(port: int, **keys: Any) -> None:
    config = config_of(address=ADDRESS, port=port, **keys)
    deploy(config, served_model(config), ADDRESS, Console(file=io.StringIO()))


def test_there_is_none_by_default() -> None:
    assert config_of().pools == ("prefill", "decode")
    assert set(workers_of(config_of())) == {"prefill", "decode"}


@pytest.mark.parametrize("keys", [{"mixed_replicas": 2}, {"mixed": {"scaling": {"max_replicas": 3}}}])
def test_its_number_or_its_scaling_makes_it(keys: dict[str, Any]) -> None:
    assert config_of(**keys).pools == ("prefill", "decode", "mixed")


@pytest.mark.parametrize(
    ("roles", "met"),
    [
        ("fixed", {"prefill": False, "decode": True, "mixed": True}),
        ("elastic", dict.fromkeys(("prefill", "decode"), True)),
    ],
)
def test_workers_hand_over_to_whoever_generates(roles: str, met: dict[str, bool]) -> None:
    workers = workers_of(config_of(roles=roles, mixed_replicas=1))

    assert {worker.pools for worker in workers.values()} == {("prefill", "decode", "mixed")}
    assert workers["mixed"].role.moves_out
    assert {pool: workers["mixed"].role.is_followed_by(workers[pool].role) for pool in met} == met
    assert all(workers["mixed"].role.meets(worker.role) for worker in workers.values())


def test_whoever_must_know_of_a_new_pool_is_replaced() -> None:
    def versions(**keys: Any) -> dict[str, Any]:
        config = config_of(**keys)
        graph = build_graph(config, served_model(config), place(config, [MACHINE]))
        bound = {pool: item._bound_deployment for pool, item in graph._bound_deployment.init_kwargs.items()}
        return {name: item.version for name, item in {**bound, "router": graph._bound_deployment}.items()}

    before, after, more = versions(), versions(mixed_replicas=1), versions(mixed_replicas=2)

    assert not before.items() & after.items()
    assert after == more


def test_its_workers_tell_what_they_have_cached_as_prefill_workers_do() -> None:
    workers = workers_of(config_of(roles="fixed", mixed_replicas=1))

    tells = {pool: worker.engine.scheduler.enable_cache_events for pool, worker in workers.items()}
    assert tells == {"prefill": True, "decode": False, "mixed": True}


def test_plans_count_its_workers() -> None:
    config = config_of(mixed_replicas=3)

    made = make_plan(config, served_model(config), [MACHINE])

    assert made.placement.counts["mixed"] == 3
    assert set(made.sizes) == {"prefill", "decode", "mixed"}
    assert made.placement.shares["mixed"].num_threads == 1, "8 cores for 5 workers"


def test_blocks_are_of_one_size_in_all_pools_that_have_workers() -> None:
    sizes = {pool: {"cache": {"block_size": 32}} for pool in ("prefill", "decode")}

    assert config_of(**sizes).pools == ("prefill", "decode")
    with pytest.raises(ValidationError, match=r"mixed\.cache\.block_size"):
        config_of(**sizes, mixed_replicas=1)


def test_pools_that_share_work_follow_the_promises_together() -> None:
    promised = {"slo": {"ttft_ms": 1000.0, "itl_ms": 50.0}, "roles": "fixed"}
    by_promise, by_load = ({"scaling": {"by": by, "max_replicas": 3}} for by in ("promise", "load"))

    assert config_of(**promised, mixed=by_promise).router_settings().scaling is not None
    assert config_of(**promised, decode=by_promise, prefill=by_load).router_settings().scaling is not None
    with pytest.raises(ValidationError, match=r"decode\.scaling is by load and mixed\.scaling by promise"):
        config_of(**promised, mixed=by_promise, decode=by_load)


def test_settings_are_shown_of_pools_that_have_workers() -> None:
    def shown(**keys: Any) -> dict[str, Any]:
        config = config_of(**keys)
        return effective(config, served_model(config))

    assert "mixed" not in shown()
    assert shown(mixed_replicas=1, mixed={"num_threads": 3})["mixed"]["num_threads"] == 3


def test_an_update_adds_it_and_takes_it_away(ray: FakeRay, port: int) -> None:
    run_deploy(port)
    assert ray.pools.targets == {"prefill": 1, "decode": 1}

    run_deploy(port, mixed_replicas=2)
    assert ray.pools.targets == {"prefill": 1, "decode": 1, "mixed": 2}

    run_deploy(port)
    assert ray.pools.targets == {"prefill": 1, "decode": 1}
