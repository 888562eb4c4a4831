"""One immutable snapshot of the scheduler's gauges and counters. Free of torch."""

from __future__ import annotations

from engine.contract.stats import Counters, SchedulerStats
from engine.scheduler.blocks.kv_cache_manager import KVCacheManager
from engine.scheduler.live_requests import LiveRequests
from engine.scheduler.remote.early_loads import EarlyLoads
from engine.scheduler.remote.leases import BlockLeases
from engine.scheduler.remote.loads import RemoteKV
from engine.scheduler.requests.row_table import RowTable


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
    """What is, and what has been counted since the start."""
    num_free, held_by_group = kv_cache.num_free, kv_cache.pool.num_held_by_group
    return SchedulerStats(
        num_running=len(table),
        num_waiting=live_requests.num_waiting + len(live_requests.ready),
        num_loading=remote.num_loading,
        num_blocks=kv_cache.num_blocks,
        num_free_blocks=num_free,
        num_held_blocks=kv_cache.num_blocks - num_free - leases.num_leased_blocks,
        num_leased_blocks=leases.num_leased_blocks,
        num_early_blocks=early.num_blocks,
        num_window_blocks=sum(
            num for num, window in zip(held_by_group, kv_cache.groups.windows, strict=True) if window is not None
        ),
        held_blocks_by_group=held_by_group,
        queued_prefill_tokens=live_requests.queued_prefill_tokens + table.num_prefill_tokens_left(),
        num_requests=counters.num_requests,
        num_finished=counters.num_finished,
        num_aborted=counters.num_aborted,
        num_moved_out=counters.num_moved_out,
        num_preemptions=counters.num_preemptions,
        num_scheduled_tokens=counters.num_scheduled_tokens,
        num_generated_tokens=counters.num_generated_tokens,
        prefix_queried_tokens=counters.prefix_queried_tokens,
        prefix_hit_tokens=counters.prefix_hit_tokens,
        remote_hit_tokens=counters.remote_hit_tokens,
        resumed_queried_tokens=counters.resumed_queried_tokens,
        resumed_hit_tokens=counters.resumed_hit_tokens,
        failed_blocks=counters.failed_blocks,
        recomputed_tokens=counters.recomputed_tokens,
        num_adopted_blocks=counters.num_adopted_blocks,
        num_dropped_early_loads=early.num_dropped,
        num_unknown_ids=counters.num_unknown_ids,
        num_nan_logits=counters.num_nan_logits,
        num_allocated_blocks=kv_cache.pool.num_allocated,
        num_evicted_blocks=kv_cache.pool.num_evicted,
        num_sampled_lifetimes=kv_cache.lifetimes.num_sampled,
        sampled_lifetime_s=kv_cache.lifetimes.total_s,
    )
