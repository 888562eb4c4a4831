"""An engine's counters and gauges, and snapshots of them. Each is declared once, here or in kv_transfer/stats.py.

Snapshots, load reports, `/metrics` and `/status` derive from the declarations. Free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field, fields
from operator import attrgetter
from typing import Any, Final

from kv_transfer.stats import Counted, TransferStats, counted, counters_of, tier_counters


def _accepted_at(place: str) -> int:
    """Declare the counter of accepted drafts at one place: a request's first draft in a step, second, ..."""
    text, metric = (
        "Accepted draft tokens, by their position among the drafts of a step.",
        "accepted_draft_tokens_by_place",
    )
    counter: int = counted(text, metric=metric, labels=(("place", place),))
    return counter


@dataclass(kw_only=True)
class Counters:
    """What the scheduler counts since its start.

    Prefix counts are in tokens. Requests that resumed, after a preemption or a load that was given up, are counted
    apart: they would raise the hit rate.

    - ``num_standoffs`` requests gave up their hand-over because two engines waited for each other.
    - ``num_adopted_blocks`` failed to load, and were computed by another request with the same prompt.
    - ``num_draft_tokens`` were computed to be verified, and ``num_accepted_draft_tokens`` of them became output; of
      these, ``num_accepted_at_1`` were the first drafts of their requests in a step, and so on.
    - ``sampled_lifetime_s`` sums, over ``num_sampled_lifetimes`` evicted blocks, the time since they were published.
    - ``num_dropped_early_loads`` gave their blocks back before their request came: it was late, or others lacked
      blocks.
    """

    num_requests: int = counted()
    num_finished: int = counted()
    num_aborted: int = counted()
    num_moved_out: int = counted()
    num_preemptions: int = counted(
        "Preemptions of requests.", metric="preemptions", vllm="num_preemptions", total="preemptions"
    )
    num_scheduled_tokens: int = counted()
    num_generated_tokens: int = counted()
    prefix_queried_tokens: int = counted(
        "Prompt tokens looked up in the prefix cache.",
        metric="prefix_cache_queried_tokens",
        vllm="prefix_cache_queries",
        total="prefix_queried_tokens",
    )
    prefix_hit_tokens: int = counted(
        "Prompt tokens whose KV was cached, or came from another engine.",
        metric="prefix_cache_hit_tokens",
        labels=(("source", "local"),),
        vllm="prefix_cache_hits",
        total="prefix_hit_tokens",
    )
    remote_hit_tokens: int = counted(
        metric="prefix_cache_hit_tokens",
        labels=(("source", "remote"),),
        vllm="external_prefix_cache_hits",
        total="remote_hit_tokens",
    )
    resumed_queried_tokens: int = counted()
    resumed_hit_tokens: int = counted()
    failed_blocks: int = counted("KV blocks that could not be fetched.", metric="failed_blocks", total="failed_blocks")
    recomputed_tokens: int = counted(
        "Tokens computed again because their KV was lost.", metric="recomputed_tokens", total="recomputed_tokens"
    )
    num_standoffs: int = counted(
        "Requests that gave up a hand-over because two engines waited for each other's leases.",
        metric="lease_standoffs",
    )
    num_adopted_blocks: int = counted()
    num_dropped_early_loads: int = counted()
    num_unknown_ids: int = counted()
    num_drafted_rows: int = counted(
        "Verifications of a request's draft tokens in a step.", metric="drafts", vllm="spec_decode_num_drafts"
    )
    num_draft_tokens: int = counted(
        "Draft tokens that were verified.", metric="draft_tokens", vllm="spec_decode_num_draft_tokens"
    )
    num_accepted_draft_tokens: int = counted(
        "Draft tokens that were accepted.", metric="accepted_draft_tokens", vllm="spec_decode_num_accepted_tokens"
    )
    num_accepted_at_1: int = _accepted_at("1")
    num_accepted_at_2: int = _accepted_at("2")
    num_accepted_at_3: int = _accepted_at("3")
    num_accepted_at_4: int = _accepted_at("4")
    num_accepted_at_5: int = _accepted_at("5")
    num_accepted_at_6: int = _accepted_at("6")
    num_accepted_at_7: int = _accepted_at("7")
    num_accepted_at_8: int = _accepted_at("8")
    num_accepted_later: int = _accepted_at("9+")
    num_nan_logits: int = counted(
        "Sampled tokens whose logits contained NaN.", metric="nan_logits", vllm="corrupted_requests"
    )
    num_allocated_blocks: int = counted()
    num_evicted_blocks: int = counted("Cached KV blocks that were evicted.", metric="evicted_blocks")
    num_sampled_lifetimes: int = counted()
    sampled_lifetime_s: float = counted(start=0.0)

    def values(self) -> dict[str, float]:
        """All counters by name."""
        return dict(zip(_SCHEDULER_COUNTERS, _read_counters(self), strict=True))


_SCHEDULER_COUNTERS: Final = tuple(counters_of(Counters))
_read_counters: Final = attrgetter(*_SCHEDULER_COUNTERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """How a gauge appears in `/metrics`, if it does: its name, without ``baton:``, and its help text."""

    text: str = ""
    metric: str | None = None


def measured(text: str = "", *, metric: str | None = None, start: object = 0) -> Any:
    """Declare a gauge as a field of a dataclass; see ``Measured``. It is ``start`` until it is measured."""
    return field(default=start, metadata={"measured": Measured(text=text, metric=metric)})


@dataclass(frozen=True, kw_only=True)
class Gauges:
    """What the scheduler measures: a base of its snapshots and of load reports.

    ``held_blocks_by_group`` are the blocks that requests and leases hold, by KV cache group. ``num_window_blocks`` are
    those in groups with a window; they are given back as they leave it. Of the blocks that are not free,
    ``num_early_blocks`` are held for announced requests and give way to others, and ``num_loading_blocks`` are being
    filled. Of the free ones, ``num_cached_blocks`` have content that can be found again.
    """

    __slots__ = ()

    num_blocks: int = measured("KV blocks.", metric="kv_cache_blocks")
    num_free_blocks: int = measured()
    num_held_blocks: int = measured()
    num_leased_blocks: int = measured("KV blocks leased to readers.", metric="num_leased_blocks")
    num_early_blocks: int = measured()
    num_loading_blocks: int = measured()
    num_cached_blocks: int = measured()
    num_window_blocks: int = measured()
    held_blocks_by_group: tuple[int, ...] = measured(start=())
    num_running: int = measured("Running requests.", metric="num_requests_running")
    num_waiting: int = measured("Waiting requests.", metric="num_requests_waiting")
    num_loading: int = measured("Requests whose KV is being loaded.", metric="num_requests_loading")
    queued_prefill_tokens: int = measured("Waiting prompt tokens.", metric="queued_prefill_tokens")
    deferred_prefill_tokens: int = measured(
        "Waiting prompt tokens of requests that cannot keep their promised TTFT any more; others go first.",
        metric="deferred_prefill_tokens",
    )
    num_decoding: int = measured("Running requests that have computed their prompt.", metric="num_requests_decoding")
    num_context_tokens: int = measured("Context tokens of running requests.", metric="num_context_tokens")


GAUGES: Final[Mapping[str, Measured]] = {item.name: item.metadata["measured"] for item in fields(Gauges)}
"""All gauges of a scheduler, by their names in snapshots, load reports and `/status`."""


class SchedulerStats(Counters, Gauges):
    """A snapshot of the scheduler: its present gauges and its counters. It never changes, unlike ``Counters``."""

    def __init__(self, counters: Counters | None = None, /, **gauges: float | tuple[int, ...]) -> None:
        """What is not given is 0, or empty. All is written at once, since nearly every step makes a snapshot."""
        values = gauges if counters is None else vars(counters) | gauges
        object.__setattr__(self, "__dict__", values)

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")


@dataclass(slots=True, kw_only=True)
class StepCounters:
    """What an engine counts of its steps. In ``num_waited_steps`` of ``num_steps``, sampling had to wait for the tokens
    of the step before.
    """

    num_steps: int = counted("Steps of the engine.", metric="engine_steps")
    num_waited_steps: int = counted(
        "Steps that waited for the sampled tokens of the previous step.", metric="engine_waited_steps"
    )
    num_borrowed_steps: int = counted("Steps that also used cores of idle workers.", metric="engine_borrowed_steps")
    step_s: float = counted("Time that the engine spent in steps.", metric="engine_step_seconds", start=0.0)
    num_integrity_failures: int = counted(
        "Failed integrity checks of KV blocks against block tables.", metric="integrity_failures"
    )

    def values(self) -> dict[str, Any]:
        """All counters by name."""
        return dict(zip(_STEPS, _read_steps(self), strict=True))


_STEPS: Final = tuple(counters_of(StepCounters))
_read_steps: Final = attrgetter(*_STEPS)


@dataclass(slots=True, kw_only=True)
class EngineStats(StepCounters):
    """One snapshot of the engine's, the scheduler's and the connector's numbers."""

    scheduler: SchedulerStats = field(default_factory=SchedulerStats)
    transfer: TransferStats = field(default_factory=TransferStats)

    def counters(self) -> dict[str, float]:
        """All counters by name, as in load reports."""
        counted = self.scheduler.values()
        counted.update(self.values())
        counted.update(zip(_TRANSFER, _read_transfer(self.transfer), strict=True))
        counted.update(tier_counters(self.transfer.tiers))
        return counted


_TRANSFER: Final = tuple(counters_of(TransferStats))
_read_transfer: Final = attrgetter(*_TRANSFER)

WORKER_COUNTERS: Final[Mapping[str, Counted]] = {
    name: told for kind in (Counters, StepCounters, TransferStats) for name, told in counters_of(kind).items()
}
"""All counters of a worker, by their names in its load reports."""
