"""A snapshot of the scheduler's gauges and counters. Free of torch."""

from __future__ import annotations

import numpy as np

from engine.contract.stats import Counters, SchedulerStats
from engine.scheduler.blocks.kv_cache_manager import KVCacheManager
from engine.scheduler.live_requests import LiveRequests
from engine.scheduler.remote.early_loads import EarlyLoads
from engine.scheduler.remote.leases import BlockLeases
from engine.scheduler.remote.loads import RemoteKV
from engine.scheduler.requests import row_passes
from engine.scheduler.requests.row_table import RowTable
from kv_transfer.cache_groups import ABSENT_BLOCK


def take_snapshot(
    *,
    counters: Counters,
    table: RowTable,
    live_requests: LiveRequests,
    kv_cache: KVCacheManager,
    remote: RemoteKV,
    leases: BlockLeases,
    early: EarlyLoads,
) -> SchedulerStats:
    """The gauges of now, and the counters since the start."""
    pool, num_leased = kv_cache.pool, leases.num_leased_blocks
    num_free, held_by_group = pool.num_free, pool.num_held_by_group
    num_prefill_tokens, num_decoding, num_context_tokens = row_passes.measure(table.columns, table.order_int32)
    # Counters kept by their owners are added only here: copying them in every step would cost more.
    counters.num_dropped_early_loads = early.num_dropped
    counters.num_allocated_blocks = pool.num_allocated
    counters.num_evicted_blocks = pool.num_evicted
    counters.num_sampled_lifetimes = kv_cache.lifetimes.num_sampled
    counters.sampled_lifetime_s = kv_cache.lifetimes.total_s
    return SchedulerStats(
        counters,
        num_running=table.num_requests,
        num_waiting=live_requests.num_waiting + len(live_requests.ready),
        num_loading=remote.num_loading,
        num_blocks=pool.num_blocks,
        num_free_blocks=num_free,
        num_held_blocks=pool.num_blocks - num_free - num_leased,
        num_leased_blocks=num_leased,
        num_early_blocks=early.num_blocks if early.by_request else 0,
        num_loading_blocks=remote.num_loading_blocks,
        num_cached_blocks=pool.num_cached,
        num_window_blocks=_num_window_blocks(kv_cache, held_by_group) if kv_cache.has_windows else 0,
        held_blocks_by_group=held_by_group,
        queued_prefill_tokens=live_requests.queued_prefill_tokens + num_prefill_tokens,
        deferred_prefill_tokens=live_requests.waiting.num_deferred_tokens,
        num_decoding=num_decoding,
        num_context_tokens=num_context_tokens,
    )


def num_common_blocks(table: RowTable) -> int:
    """Leading blocks of the first group that the tables of all running rows share."""
    rows = table.order
    if rows.size == 0:
        return 0
    num_columns = int(table.num_blocks[0, rows].min())
    tables = table.block_table[0, rows, :num_columns]
    differs = np.flatnonzero((tables != tables[0]).any(axis=0) | (tables[0] == ABSENT_BLOCK))
    return int(differs[0]) if differs.size else num_columns


def _num_window_blocks(kv_cache: KVCacheManager, held_by_group: tuple[int, ...]) -> int:
    windows = kv_cache.groups.windows
    return sum(num for num, window in zip(held_by_group, windows, strict=True) if window is not None)
