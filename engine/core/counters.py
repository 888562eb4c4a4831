"""What the scheduler counts since its start; ``SchedulerStats`` is its immutable snapshot. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass


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
