"""The number of allocated KV blocks, and the message if they would not be enough."""

from __future__ import annotations

import pytest

from engine.contract.config import CacheConfig
from engine.contract.errors import ConfigError
from engine.device.memory import (
    DEFAULT_CPU_BYTES,
    MIB,
    CacheDemand,
    MemoryBudget,
    choose_num_blocks,
    cpu_budget,
    gpu_budget,
    size_reason,
)
from kv_transfer.layout import KVLayout, group_layers

LAYOUT = KVLayout(
    model_hash="m",
    groups=group_layers([None] * 4),
    num_kv_heads=2,
    head_dim=64,
    block_size=16,
    dtype="float16",
    bytes_per_element=2,
)
BLOCK_BYTES = 4 * 2 * 16 * 2 * 64 * 2
DEMAND = CacheDemand(layout=LAYOUT, max_model_len=1000, max_num_seqs=8)
BLOCKS_PER_SEQUENCE = 63


def _budget(num_bytes: int) -> MemoryBudget:
    return MemoryBudget(num_bytes=num_bytes, reason="because")


@pytest.mark.parametrize(
    ("num_bytes", "num_blocks"),
    [
        (63 * BLOCK_BYTES, 63),
        (100 * BLOCK_BYTES - 1, 99),
        (100 * BLOCK_BYTES, 100),
        (1 << 40, 63 * 8),
    ],
)
def test_as_many_blocks_as_fit_and_are_useful(num_bytes: int, num_blocks: int) -> None:
    assert LAYOUT.block_bytes == BLOCK_BYTES
    assert choose_num_blocks(CacheConfig(), DEMAND, _budget(num_bytes)) == num_blocks


def test_a_number_of_blocks_that_is_given_counts() -> None:
    assert choose_num_blocks(CacheConfig(num_blocks=70), DEMAND, _budget(0)) == 70


def test_one_block_too_few_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError) as caught:
        choose_num_blocks(CacheConfig(), DEMAND, _budget(63 * BLOCK_BYTES - 1))
    message = str(caught.value)
    assert "one request of max_model_len 1000" in message
    assert "63 blocks of 16 tokens x 2048 bytes = 2.0 MiB" in message
    assert "because" in message
    assert "gives 62 blocks" in message
    assert "lower max_model_len to 992" in message
    assert "\n" not in message


def test_too_few_given_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_blocks = 62 gives 62 blocks"):
        choose_num_blocks(CacheConfig(num_blocks=62), DEMAND, _budget(1 << 40))


def test_bytes_that_are_given_count_on_any_device() -> None:
    cache = CacheConfig(kv_cache_bytes=123)
    assert cpu_budget(cache, DEMAND, available_bytes=1 << 40).num_bytes == 123
    assert gpu_budget(cache, total_bytes=1 << 40, used_bytes=0, peak_step_bytes=0).num_bytes == 123


def test_cpu_default_is_a_gibibyte() -> None:
    assert cpu_budget(CacheConfig(), DEMAND, available_bytes=1 << 40).num_bytes == DEFAULT_CPU_BYTES


def test_cpu_default_stays_within_a_share_of_what_is_available() -> None:
    assert cpu_budget(CacheConfig(), DEMAND, available_bytes=1000 * MIB).num_bytes == 400 * MIB


def test_cpu_default_grows_for_one_long_sequence() -> None:
    demand = CacheDemand(layout=LAYOUT, max_model_len=1 << 20, max_num_seqs=8)
    assert cpu_budget(CacheConfig(), demand, available_bytes=1 << 40).num_bytes == 2 << 30


@pytest.mark.parametrize(
    ("cache", "available_mib", "reason"),
    [
        (CacheConfig(num_blocks=9), 1 << 20, "num_blocks = 9"),
        (CacheConfig(kv_cache_bytes=1 << 20), 1 << 20, "kv_cache_bytes = 1048576"),
        (CacheConfig(), 1 << 20, "the default on a CPU"),
        (CacheConfig(), 100, "40% of 100.0 MiB available memory"),
        (CacheConfig(kv_cache_bytes=1 << 40), 1 << 20, "all that max_num_seqs = 8 sequences of max_model_len can use"),
    ],
)
def test_size_is_explained_by_what_it_comes_from(cache: CacheConfig, available_mib: int, reason: str) -> None:
    demand = CacheDemand(layout=LAYOUT, max_model_len=1 << 17, max_num_seqs=8)

    budget = cpu_budget(cache, demand, available_bytes=available_mib * MIB)

    assert size_reason(cache, demand, budget) == reason


def test_two_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_bytes \(5\) and num_blocks \(7\) both say .* leave one out"):
        CacheConfig(kv_cache_bytes=5, num_blocks=7)


def test_gpu_share_less_what_is_in_use_and_what_a_step_takes() -> None:
    budget = gpu_budget(
        CacheConfig(gpu_memory_utilization=0.5), total_bytes=1000 * MIB, used_bytes=100 * MIB, peak_step_bytes=50 * MIB
    )
    assert budget.num_bytes == 350 * MIB
    assert budget.reason == (
        "gpu_memory_utilization 0.5 of 1000.0 MiB = 500.0 MiB, less 100.0 MiB in use and 50.0 MiB for a step"
    )


def test_decode_graphs_are_paid_for_before_the_cache() -> None:
    budget = gpu_budget(
        CacheConfig(gpu_memory_utilization=0.5),
        total_bytes=1000 * MIB,
        used_bytes=100 * MIB,
        peak_step_bytes=50 * MIB,
        graph_bytes=30 * MIB,
    )
    assert budget.num_bytes == 320 * MIB
    assert budget.reason.endswith("100.0 MiB in use and 50.0 MiB for a step and 30.0 MiB for decode graphs")


def test_engines_on_one_gpu_do_not_pay_for_each_other() -> None:
    """Whoever starts second finds its half free, though more than half of the GPU is in use by then."""
    shares = CacheConfig(gpu_memory_utilization=0.45)
    first = gpu_budget(
        shares, total_bytes=1000 * MIB, used_bytes=100 * MIB, peak_step_bytes=50 * MIB, free_bytes=900 * MIB
    )
    second = gpu_budget(
        shares, total_bytes=1000 * MIB, used_bytes=100 * MIB, peak_step_bytes=50 * MIB, free_bytes=450 * MIB
    )
    assert first.num_bytes == second.num_bytes == 300 * MIB


def test_no_more_is_taken_than_others_left_free() -> None:
    budget = gpu_budget(
        CacheConfig(gpu_memory_utilization=0.9),
        total_bytes=1000 * MIB,
        used_bytes=100 * MIB,
        peak_step_bytes=50 * MIB,
        graph_bytes=30 * MIB,
        free_bytes=200 * MIB,
    )
    assert budget.num_bytes == 120 * MIB
    assert budget.reason == (
        "200.0 MiB free of 1000.0 MiB, which other processes use as well, less 50.0 MiB for a step and 30.0 MiB for "
        "decode graphs"
    )


def test_gpu_that_is_full_gives_nothing() -> None:
    budget = gpu_budget(CacheConfig(), total_bytes=1000, used_bytes=950, peak_step_bytes=0)
    assert budget.num_bytes == 0
