"""How a machine is shared out."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config import BatonConfig
from cluster.placement import Machine, logical_cpus, share_out
from engine.errors import ConfigError

LAPTOP = Machine(num_cores=2, num_gpus=0)


@pytest.mark.parametrize(("replicas", "num_threads"), [((1, 1), 1), ((2, 2), 1)])
def test_laptop_gives_every_worker_at_least_one_thread(replicas: tuple[int, int], num_threads: int) -> None:
    config = BatonConfig(prefill_replicas=replicas[0], decode_replicas=replicas[1])

    assert share_out(config, "prefill", LAPTOP).num_threads == num_threads


def test_cores_are_shared_evenly() -> None:
    config = BatonConfig(prefill_replicas=1, decode_replicas=3)

    assert share_out(config, "decode", Machine(num_cores=16, num_gpus=0)).num_threads == 4


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
    share = share_out(BatonConfig(), "decode", Machine(num_cores=64, num_gpus=8))

    assert (share.num_gpus, share.gpu_share) == (1.0, 1.0)


def test_workers_share_one_gpu_and_its_memory() -> None:
    config = BatonConfig()
    share = share_out(config, "decode", Machine(num_cores=16, num_gpus=1))

    engine = share.apply(config.engine_config("decode", model=Path("/m"), num_threads=1))

    assert share.num_gpus == 0.5
    assert engine.cache.gpu_memory_utilization == pytest.approx(0.45)


def test_three_workers_never_book_more_than_the_gpu() -> None:
    config = BatonConfig(decode_replicas=2)

    assert 3 * share_out(config, "prefill", Machine(num_cores=16, num_gpus=1)).num_gpus <= 1


def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="no GPU"):
        share_out(BatonConfig(device="cuda"), "prefill", LAPTOP)


def test_cpu_is_cpu_beside_gpus() -> None:
    assert share_out(BatonConfig(device="cpu"), "prefill", Machine(num_cores=16, num_gpus=8)).num_gpus == 0
