"""The number of workers of a pool that follows its load, after a changed configuration is deployed over it."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from cluster.commands.deploy import deploy
from cluster.config.config import BatonConfig
from cluster.config.names import APP_NAME
from cluster.config.served_model import served_model
from cluster.deploy.deployment import StartError
from cluster.serve_app import build
from tests.support.cluster.fake_ray import ADDRESS, FAILED, FakeRay

FEWER_SEQS = {"scheduler": {"max_num_seqs": 8}}
"""A setting with which workers are replaced."""


def keys_of(scaling: dict[str, Any], *, replicas: int = 2, **decode: Any) -> dict[str, Any]:
    return {"decode_replicas": replicas, "decode": {"scaling": {"max_replicas": 6, **scaling}, **decode}}


def run_deploy(port: int, **keys: Any) -> None:
    config = BatonConfig.model_validate({"address": ADDRESS, "port": port, **keys})
    deploy(config, served_model(config), ADDRESS, Console(file=io.StringIO()))


def surge(ray: FakeRay) -> int:
    """The number of decode workers that Serve may start before it stops as many, by its own count."""
    return -(-ray.pools.told["decode"].max_surge_percent * ray.pools.targets["decode"] // 100)


@pytest.mark.parametrize(
    ("scaling", "decode", "target"),
    [
        ({}, {}, 5),
        ({"up_delay_s": 1}, {}, 5),
        ({}, FEWER_SEQS, 5),
        ({"max_replicas": 3}, FEWER_SEQS, 3),
        ({"max_replicas": 9, "min_replicas": 7}, FEWER_SEQS, 7),
    ],
    ids=["nothing changed", "when it grows", "a worker's setting", "fewer may run", "more must run"],
)
def test_pool_that_has_grown_stays_as_large(
    ray: FakeRay, port: int, scaling: dict[str, Any], decode: dict[str, Any], target: int
) -> None:
    run_deploy(port, **keys_of({}))
    assert ray.pools.targets["decode"] == 2
    ray.pools.targets["decode"] = 5

    run_deploy(port, **keys_of(scaling, **decode))

    assert ray.pools.targets["decode"] == target


def test_pool_that_has_shrunk_stays_as_small(ray: FakeRay, port: int) -> None:
    run_deploy(port, **keys_of({}))
    ray.pools.targets["decode"] = 1

    run_deploy(port, **keys_of({}, **FEWER_SEQS))

    assert ray.pools.targets["decode"] == 1


def test_pool_that_begins_to_follow_its_load_begins_with_what_runs(ray: FakeRay, port: int) -> None:
    run_deploy(port, decode_replicas=4)

    run_deploy(port, **keys_of({}))

    assert ray.pools.targets["decode"] == 4


def test_update_that_is_taken_back_leaves_a_pool_as_large_as_it_was(ray: FakeRay, port: int) -> None:
    run_deploy(port, **keys_of({}))
    ray.pools.targets["decode"] = 5
    ray.outcomes = [FAILED]

    with pytest.raises(StartError, match="the previous configuration runs again"):
        run_deploy(port, **keys_of({}, **FEWER_SEQS))

    assert ray.pools.targets["decode"] == 5


def test_pool_without_scaling_has_as_many_as_are_asked_for(ray: FakeRay, port: int) -> None:
    run_deploy(port, **keys_of({}))
    ray.pools.targets["decode"] = 5

    run_deploy(port, decode_replicas=2)

    assert ray.pools.targets["decode"] == 2


def test_cluster_after_a_shutdown_begins_with_what_its_configuration_says(ray: FakeRay, port: int) -> None:
    run_deploy(port, **keys_of({}))
    ray.pools.targets["decode"] = 5
    ray.shut_down_serve()

    run_deploy(port, **keys_of({}))

    assert ray.pools.targets["decode"] == 2


def test_one_worker_more_is_one_however_many_there_are(ray: FakeRay, port: int) -> None:
    run_deploy(port, **keys_of({}))
    assert surge(ray) == 1
    ray.pools.targets["decode"] = 5

    run_deploy(port, **keys_of({}, **FEWER_SEQS))

    assert surge(ray) == 1


def test_machines_that_are_full_by_now_have_no_room_for_one_more(ray: FakeRay, port: int) -> None:
    """8 CPUs, of which 6 workers, of 1.2 each, leave 0.8: at 2 workers there was room for more of them."""
    run_deploy(port, **keys_of({}, num_cpus=1.2))
    assert surge(ray) == 1
    ray.pools.targets["decode"] = 6

    run_deploy(port, **keys_of({}, num_cpus=1.2, **FEWER_SEQS))

    assert (ray.pools.targets["decode"], surge(ray)) == (6, 0)


def test_new_workers_do_not_wait_for_room_that_old_ones_take_until_they_stop(ray: FakeRay, port: int) -> None:
    """8 CPUs are full of two workers of 3.9; when they take 2 each, the first of them has to stop first."""
    large, small = {"num_cpus": 3.9}, {"num_cpus": 2}
    run_deploy(port, prefill=large, decode=large)

    run_deploy(port, prefill=small, decode=small)
    assert surge(ray) == 0
    run_deploy(port, prefill=small, decode=small)
    assert surge(ray) == 1


def test_update_waits_for_no_worker_that_finds_no_machine_now(ray: FakeRay, port: int) -> None:
    """8 CPUs have room for 6 workers of 1.2 and for 3 of 2.4; the other ones come back when there are machines."""
    run_deploy(port, **keys_of({}, num_cpus=1.2))
    ray.pools.targets["decode"] = 6

    run_deploy(port, **keys_of({}, num_cpus=2.4))

    assert (ray.pools.targets["decode"], surge(ray)) == (3, 0)


def test_serve_configuration_looks_for_room_beside_what_runs_meanwhile(ray: FakeRay, port: int) -> None:
    large, small = {"num_cpus": 3.9}, {"num_cpus": 2}
    ray.connect()
    ray.start_serve({"host": "0.0.0.0", "port": port})
    ray.run(build({"prefill": large, "decode": large}), name=APP_NAME)
    ray.pools.is_building = True

    ray.run(build({"prefill": small, "decode": small}), name=APP_NAME)

    assert surge(ray) == 0


def test_serve_configuration_that_is_applied_again_leaves_a_pool_as_large_as_it_is(ray: FakeRay, port: int) -> None:
    """Serve builds it in a task, and meanwhile lists nothing of what runs."""
    ray.connect()
    ray.start_serve({"host": "0.0.0.0", "port": port})
    ray.run(build(keys_of({})), name=APP_NAME)
    assert ray.pools.targets["decode"] == 2
    ray.pools.targets["decode"] = 5
    ray.pools.is_building = True

    ray.run(build(keys_of({}, **FEWER_SEQS)), name=APP_NAME)

    assert ray.pools.targets["decode"] == 5
