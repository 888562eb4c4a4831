"""How a machine is shared out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.config.config import BatonConfig
from cluster.plan.inventory import Node
from cluster.plan.placement import RunningPool, WorkerShare, logical_cpus, place, wanted_resources
from engine.contract.errors import ConfigError


def machine(*, num_cores: int, num_gpus: float = 0, address: str = "a", **resources: float) -> Node:
    return Node(
        address=address,
        num_cores=num_cores,
        num_cpus=float(num_cores),
        num_gpus=num_gpus,
        memory_bytes=1 << 34,
        resources=resources,
    )


LAPTOP = machine(num_cores=2)


def pools(numbers: dict[str, int], *, demands: dict[str, float] | None = None) -> dict[str, RunningPool]:
    """Running pools, with what each worker takes; by default what it would take now."""
    return {pool: RunningPool(num_replicas=number, demands=demands) for pool, number in numbers.items()}


def share_out(config: BatonConfig, pool: str, node: Node) -> WorkerShare:
    return place(config, [node]).shares[pool]


@pytest.mark.parametrize(("replicas", "num_threads"), [((1, 1), 1), ((2, 2), 1)])
def test_laptop_gives_every_worker_at_least_one_thread(replicas: tuple[int, int], num_threads: int) -> None:
    config = BatonConfig(prefill_replicas=replicas[0], decode_replicas=replicas[1])

    assert share_out(config, "prefill", LAPTOP).num_threads == num_threads


def test_cores_are_shared_evenly() -> None:
    config = BatonConfig(prefill_replicas=1, decode_replicas=3)

    assert share_out(config, "decode", machine(num_cores=16, num_gpus=0)).num_threads == 4


@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 2, 1), (4, 8, 2)])
def test_private_ray_has_room_for_every_process(replicas: tuple[int, int, int]) -> None:
    prefill, decode, routers = replicas
    config = BatonConfig(prefill_replicas=prefill, decode_replicas=decode, router_replicas=routers)

    needed = sum(
        count * share_out(config, pool, LAPTOP).num_cpus for pool, count in (("prefill", prefill), ("decode", decode))
    )

    assert logical_cpus(config, num_cores=2) >= needed + routers * 0.1


def test_private_ray_has_room_for_what_a_pool_reserves() -> None:
    config = BatonConfig.model_validate({"decode_replicas": 2, "decode": {"num_cpus": 8}})

    assert logical_cpus(config, num_cores=2) >= 16


def test_auto_device_takes_no_gpu_where_there_is_none() -> None:
    assert share_out(BatonConfig(), "prefill", LAPTOP).num_gpus == 0


def test_each_worker_gets_its_own_gpu_where_there_are_enough() -> None:
    share = share_out(BatonConfig(), "decode", machine(num_cores=64, num_gpus=8))

    assert (share.num_gpus, share.gpu_share) == (1.0, 1.0)


def test_workers_share_one_gpu_and_its_memory() -> None:
    config = BatonConfig()
    share = share_out(config, "decode", machine(num_cores=16, num_gpus=1))

    engine = share.apply(config.engine_config("decode", model=Path("/m"), num_threads=1))

    assert share.num_gpus == 0.5
    assert engine.cache.gpu_memory_utilization == pytest.approx(0.45)


GROWS_TO_FOUR = {"decode": {"scaling": {"max_replicas": 4}}}


def test_workers_share_one_gpu_with_those_that_a_load_may_ask_for() -> None:
    config = BatonConfig.model_validate(GROWS_TO_FOUR)
    gpu = machine(num_cores=16, num_gpus=1)

    first, grown = place(config, [gpu]), place(config, [gpu], running=pools({"decode": 4}))

    parts = [[share.num_gpus for share in placement.shares.values()] for placement in (first, grown)]
    assert parts == [[0.2, 0.2], [0.2, 0.2]], "a worker is not replaced when others come"
    assert (grown.counts["decode"], grown.homeless()) == (4, [])


def test_pool_that_says_what_it_takes_of_a_gpu_leaves_the_other_one_as_much_as_it_had() -> None:
    config = BatonConfig.model_validate({"decode": {"num_gpus": 0.125, **GROWS_TO_FOUR["decode"]}})

    shares = place(config, [machine(num_cores=16, num_gpus=1)]).shares

    assert (shares["prefill"].num_gpus, shares["decode"].num_gpus) == (0.5, 0.125)


def test_however_many_workers_a_load_may_ask_for_each_takes_a_part_of_the_gpu() -> None:
    config = BatonConfig.model_validate({"decode": {"scaling": {"max_replicas": 5000}}})

    assert share_out(config, "decode", machine(num_cores=16, num_gpus=1)).num_gpus == 0.01


def test_workers_that_a_load_may_ask_for_do_not_crowd_the_first_ones_on_one_of_several_gpus() -> None:
    """Ray fills a GPU before it begins another: with parts for five, two workers would share the first of two."""
    config = BatonConfig.model_validate(GROWS_TO_FOUR)

    assert share_out(config, "decode", machine(num_cores=16, num_gpus=2)).num_gpus == 1.0


def test_three_workers_never_book_more_than_the_gpu() -> None:
    config = BatonConfig(decode_replicas=2)

    assert 3 * share_out(config, "prefill", machine(num_cores=16, num_gpus=1)).num_gpus <= 1


def test_workers_that_share_gpus_each_fit_on_one() -> None:
    """Ray takes a part of a GPU from one GPU: of three workers at 0.66 on two GPUs one would wait for ever."""
    config = BatonConfig(decode_replicas=2)
    placement = place(config, [machine(num_cores=16, num_gpus=2)])

    assert placement.shares["decode"].num_gpus == 0.5
    assert not placement.homeless()


def test_what_two_gpus_have_left_together_fits_nobody() -> None:
    part = {"num_gpus": 0.6}
    config = BatonConfig.model_validate({"decode_replicas": 2, "prefill": part, "decode": part})

    homeless = place(config, [machine(num_cores=16, num_gpus=2)]).homeless()

    assert [(item.deployment, item.number) for item in homeless] == [("decode", 2)]


def test_parts_fill_a_gpu_before_they_break_another() -> None:
    config = BatonConfig.model_validate(
        {"decode_replicas": 2, "prefill": {"num_gpus": 0.5}, "decode": {"num_gpus": 1.5}}
    )

    assert not place(config, [machine(num_cores=16, num_gpus=4)]).homeless()
    assert len(place(config, [machine(num_cores=16, num_gpus=3)]).homeless()) == 1


def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="device is cuda, but no machine has a GPU; set device to cpu or auto"):
        share_out(BatonConfig(device="cuda"), "prefill", LAPTOP)


def test_cpu_is_cpu_beside_gpus() -> None:
    assert share_out(BatonConfig(device="cpu"), "prefill", machine(num_cores=16, num_gpus=8)).num_gpus == 0


PREFILL_AND_DECODE = {
    "prefill": {"resources": {"baton_prefill": 0.001}},
    "decode": {"resources": {"baton_decode": 0.001}},
}


def gpu_cluster() -> list[Node]:
    prefill = [machine(num_cores=32, num_gpus=1, address=f"p{n}", baton_prefill=1) for n in (1, 2)]
    return [*prefill, *(machine(num_cores=32, num_gpus=1, address=f"d{n}", baton_decode=1) for n in (1, 2))]


def homes(config: BatonConfig, nodes: list[Node], deployment: str) -> list[str | None]:
    placed = place(config, nodes).placed
    return [item.node.address if item.node else None for item in placed if item.deployment == deployment]


def test_pools_land_on_the_machines_that_offer_their_resource_one_gpu_each() -> None:
    config = BatonConfig.model_validate({"prefill_replicas": 2, "decode_replicas": 2, **PREFILL_AND_DECODE})

    assert homes(config, gpu_cluster(), "prefill") == ["p1", "p2"]
    assert homes(config, gpu_cluster(), "decode") == ["d1", "d2"]
    assert place(config, gpu_cluster()).shares["decode"].num_gpus == 1


def test_a_worker_too_many_has_no_home() -> None:
    config = BatonConfig.model_validate({"prefill_replicas": 2, "decode_replicas": 3, **PREFILL_AND_DECODE})

    homeless = place(config, gpu_cluster()).homeless()

    assert [(item.deployment, item.number) for item in homeless] == [("decode", 3)]


def test_workers_without_gpus_are_spread() -> None:
    config = BatonConfig(prefill_replicas=2, decode_replicas=4)
    nodes = [machine(num_cores=8, address=name) for name in ("a", "b", "c")]

    assert set(homes(config, nodes, "decode")) == {"a", "b", "c"}
    assert len(set(homes(config, nodes, "prefill"))) == 2


def test_machine_has_no_more_of_a_pool_than_it_may() -> None:
    config = BatonConfig.model_validate({"prefill_replicas": 3, "decode_replicas": 3, "decode": {"max_per_node": 1}})
    nodes = [machine(num_cores=8, address=name) for name in ("a", "b")]
    placement = place(config, nodes)

    assert [(item.deployment, item.number) for item in placement.homeless()] == [("decode", 3)]
    assert placement.room == {"prefill": True, "decode": False, "router": True}


def test_one_router_per_node_leaves_out_a_head_without_cpus() -> None:
    nodes = [machine(num_cores=0, address="head"), *(machine(num_cores=8, address=name) for name in ("a", "b"))]

    assert homes(BatonConfig(router_per_node=True), nodes, "router") == ["a", "b"]


def test_cores_are_those_of_the_worker_s_own_machine() -> None:
    nodes = [machine(num_cores=16, address="p", baton_prefill=1), machine(num_cores=4, address="d", baton_decode=1)]
    shares = place(BatonConfig.model_validate({"decode_replicas": 2, **PREFILL_AND_DECODE}), nodes).shares

    assert (shares["prefill"].num_threads, shares["decode"].num_threads) == (16, 2)


def test_room_for_one_more_is_known() -> None:
    config = BatonConfig.model_validate({"prefill_replicas": 1, "decode_replicas": 2, **PREFILL_AND_DECODE})

    assert place(config, gpu_cluster()).room == {"prefill": True, "decode": False, "router": True}


def test_private_ray_offers_the_resources_that_a_configuration_takes() -> None:
    config = BatonConfig.model_validate({"decode_replicas": 3, **PREFILL_AND_DECODE})

    assert wanted_resources(config) == {"baton_prefill": 1.0, "baton_decode": 1.0}


SCALING = {"decode": {"resources": {"baton_decode": 1}, "scaling": {"min_replicas": 2, "max_replicas": 3}}}


@pytest.mark.parametrize(("given", "first"), [(1, 2), (3, 3), (9, 3)])
def test_pool_that_scales_is_placed_as_it_begins(given: int, first: int) -> None:
    config = BatonConfig.model_validate({"decode_replicas": given, **SCALING})

    assert len(homes(config, [machine(num_cores=8, baton_decode=9)], "decode")) == first


def test_private_ray_offers_what_a_pool_takes_when_it_has_grown() -> None:
    assert wanted_resources(BatonConfig.model_validate(SCALING)) == {"baton_decode": 3.0}


GROWING = {"decode": {"resources": {"baton_decode": 0.001}, "scaling": {"max_replicas": 8}}}


def growing(**keys: Any) -> BatonConfig:
    return BatonConfig.model_validate({**PREFILL_AND_DECODE, **GROWING, **keys})


def test_pool_that_has_grown_leaves_no_room_where_there_was_some() -> None:
    assert place(growing(), gpu_cluster()).room["decode"] is True

    grown = place(growing(), gpu_cluster(), running=pools({"prefill": 1, "decode": 2}))

    assert (grown.counts["decode"], grown.room["decode"]) == (2, False)
    assert grown.counts["prefill"] == 1


def test_workers_that_a_load_asks_for_in_vain_are_left_out_and_those_that_must_be_there_are_missed() -> None:
    grown = place(growing(decode_replicas=2), gpu_cluster(), running=pools({"decode": 6}))
    too_many = place(growing(decode_replicas=4), gpu_cluster(), running=pools({"decode": 6}))

    assert (grown.counts["decode"], grown.homeless()) == (2, [])
    assert too_many.counts["decode"] == 4
    assert [item.number for item in too_many.homeless()] == [3, 4]


def test_pool_that_has_grown_takes_no_machine_from_one_that_must_have_it() -> None:
    machines = [machine(num_cores=8, num_gpus=1, address=name) for name in ("a", "b", "c", "d")]
    scaling = {"scaling": {"max_replicas": 8}}
    config = BatonConfig.model_validate({"decode_replicas": 2, "prefill": scaling, "decode": scaling})

    counts = place(config, machines, running=pools({"prefill": 4, "decode": 2})).counts

    assert (counts["prefill"], counts["decode"]) == (2, 2)


@pytest.mark.parametrize(("target", "count"), [(1, 2), (2, 2), (5, 5), (9, 6)])
def test_pool_goes_on_with_what_it_has_within_its_bounds(target: int, count: int) -> None:
    config = BatonConfig.model_validate(
        {"decode_replicas": 3, "decode": {"scaling": {"min_replicas": 2, "max_replicas": 6}}}
    )

    assert place(config, [machine(num_cores=8)], running=pools({"decode": target})).counts["decode"] == count


def test_new_workers_find_no_room_beside_old_ones_that_take_more() -> None:
    """Halves of a GPU that become fifths, as where a pool begins to follow its load."""
    config, gpu = BatonConfig.model_validate(GROWS_TO_FOUR), [machine(num_cores=16, num_gpus=1)]
    both = {"prefill": 1, "decode": 1}

    beside_halves = place(config, gpu, running=pools(both, demands={"CPU": 0.1, "GPU": 0.5}))
    beside_fifths = place(config, gpu, running=pools(both, demands={"CPU": 0.1, "GPU": 0.2}))

    assert (beside_halves.room["prefill"], beside_halves.room["decode"]) == (False, False)
    assert (beside_fifths.room["prefill"], beside_fifths.room["decode"]) == (True, True)


def test_what_is_drained_in_any_case_leaves_its_room() -> None:
    config, gpus = BatonConfig(device="cuda"), [machine(num_cores=16, num_gpus=1, address=name) for name in "abcd"]
    running = pools({"prefill": 1, "decode": 3}, demands={"CPU": 0.5, "GPU": 1.0})

    assert place(config, gpus, running=running).room["decode"] is True
