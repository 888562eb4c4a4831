"""What an engine counts: the counters, and immutable snapshots of them with gauges. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_transfer.connector import TransferStats


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Gauges of now and counters since the start.

    Prefix counts are in tokens. Those of requests that resumed, after a preemption or a load that was given
    up, are apart: they would flatter the rate.
    ``num_adopted_blocks`` failed to load and were computed by another request with the same prompt.
    ``num_nan_logits`` counts sampled tokens whose logits held a NaN.
    ``sampled_lifetime_s`` sums, over ``num_sampled_lifetimes`` evicted blocks, the time since they were published.
    ``held_blocks_by_group`` are those that requests and leases hold, by KV cache group; ``num_window_blocks`` are the
    ones of groups whose layers see a window, which are given back as they leave it.
    ``num_dropped_early_loads`` gave their blocks back before their request came: it was late, or others lacked them.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_loading: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_held_blocks: int = 0
    num_leased_blocks: int = 0
    num_early_blocks: int = 0
    num_window_blocks: int = 0
    held_blocks_by_group: tuple[int, ...] = ()
    queued_prefill_tokens: int = 0
    num_requests: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_moved_out: int = 0
    num_preemptions: int = 0
    num_scheduled_tokens: int = 0
    num_generated_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    remote_hit_tokens: int = 0
    resumed_queried_tokens: int = 0
    resumed_hit_tokens: int = 0
    failed_blocks: int = 0
    recomputed_tokens: int = 0
    num_adopted_blocks: int = 0
    num_dropped_early_loads: int = 0
    num_unknown_ids: int = 0
    num_nan_logits: int = 0
    num_allocated_blocks: int = 0
    num_evicted_blocks: int = 0
    num_sampled_lifetimes: int = 0
    sampled_lifetime_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The scheduler's and the connector's numbers together.

    Of ``num_steps`` the sampling of ``num_waited_steps`` had to wait for the tokens of the step before.
    """

    scheduler: SchedulerStats = field(default_factory=SchedulerStats)
    transfer: TransferStats = field(default_factory=TransferStats)
    num_steps: int = 0
    num_waited_steps: int = 0
    step_s: float = 0.0
    num_integrity_failures: int = 0


@dataclass(slots=True)
class Counters:
    """Plain counters; names are those of ``SchedulerStats``."""

    num_requests: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_moved_out: int = 0
    num_preemptions: int = 0
    num_scheduled_tokens: int = 0
    num_generated_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    remote_hit_tokens: int = 0
    resumed_queried_tokens: int = 0
    resumed_hit_tokens: int = 0
    failed_blocks: int = 0
    recomputed_tokens: int = 0
    num_adopted_blocks: int = 0
    num_unknown_ids: int = 0
    num_nan_logits: int = 0
