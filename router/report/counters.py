"""This router's counters since its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from engine.versions import across_versions
from kv_transfer.stats import Counted, counted, counters_of
from router.placement.reason import Reason

TYPICAL_OUTPUT_TOKENS = 128.0
"""Assumed mean output until some sequence has finished."""


def _placed(reason: Reason) -> int:
    """Declare the counter of sequences that were placed for a reason."""
    text = "Sequences by the reason for their placement, with elastic roles."
    counter: int = counted(text, metric="placements", labels=(("reason", reason.value),), total=f"placed_{reason}")
    return counter


@across_versions
@dataclass(slots=True, kw_only=True)
class RouterCounters:
    """Counts of sequences and tokens. ``num_failed`` ended with an error; clients cancelled ``num_cancelled``.
    ``num_invalid`` asked for something that only a worker could find invalid, such as a grammar it cannot follow.

    ``num_refused`` were refused on arrival because there were too many; ``num_requests`` does not include them.

    ``num_migrations`` continued at another decode worker after theirs was lost, ``num_drain_moves`` because theirs
    drained.
    """

    num_requests: int = counted("Sequences accepted.", metric="requests", total="requests")
    num_finished: int = counted(total="finished")
    num_failed: int = counted(total="failed")
    num_cancelled: int = counted(total="cancelled")
    num_refused: int = counted(
        "Sequences refused because too many were in progress or waiting.",
        metric="requests_refused",
        total="refused",
    )
    num_invalid: int = counted(
        "Sequences that a worker refused as invalid.", metric="requests_invalid", total="invalid"
    )
    num_generated_tokens: int = counted(total="tokens")
    num_prompt_tokens: int = counted(total="prompt_tokens")
    num_prefill_retries: int = counted(
        "Prompts sent again, to another prefill worker.", metric="prefill_retries", total="prefill_retries"
    )
    num_migrations: int = counted(
        "Sequences that continued on another decode worker after theirs was lost.",
        metric="migrations",
        total="migrations",
    )
    num_drain_moves: int = counted(
        "Sequences moved with their KV from a draining decode worker.", metric="drain_moves", total="drain_moves"
    )
    num_local_prefills: int = counted(
        "Prompts computed by decode workers because prefill workers were lost or far behind.",
        metric="local_prefills",
        total="local_prefills",
    )

    num_ttft_promises: int = counted(
        "Sequences with a promised time to first token that got it or failed.",
        metric="ttft_promises",
        total="ttft_promises",
    )
    num_ttft_kept: int = counted(
        "Sequences whose first token kept its promise.", metric="ttft_promises_kept", total="ttft_promises_kept"
    )
    num_itl_promises: int = counted(
        "Finished sequences of several tokens with a promised inter-token latency.",
        metric="itl_promises",
        total="itl_promises",
    )
    num_itl_kept: int = counted(
        "Sequences whose mean inter-token latency kept its promise.",
        metric="itl_promises_kept",
        total="itl_promises_kept",
    )
    num_gap_moves: int = counted(
        "Running sequences moved to another decode worker, by reason.",
        metric="rebalance_moves",
        labels=(("reason", "gap"),),
        total="gap_moves",
    )
    num_kv_moves: int = counted(metric="rebalance_moves", labels=(("reason", "kv"),), total="kv_moves")
    num_queue_moves: int = counted(metric="rebalance_moves", labels=(("reason", "queue"),), total="queue_moves")
    num_ordered_moves: int = counted(metric="rebalance_moves", labels=(("reason", "order"),), total="ordered_moves")
    num_failed_moves: int = counted(
        "Ordered moves that were not carried out.", metric="rebalance_moves_failed", total="failed_moves"
    )
    num_placed_colocated: int = _placed(Reason.COLOCATED)
    num_placed_apart: int = _placed(Reason.APART)
    num_placed_overflow_to_prefill: int = _placed(Reason.OVERFLOW_TO_PREFILL)
    num_placed_overflow_to_decode: int = _placed(Reason.OVERFLOW_TO_DECODE)
    num_placed_split: int = _placed(Reason.SPLIT)
    num_placed_models_unknown: int = _placed(Reason.MODELS_UNKNOWN)
    num_placed_override: int = _placed(Reason.OVERRIDE)
    num_placed_session: int = _placed(Reason.SESSION)
    num_placed_leader: int = _placed(Reason.LEADER)

    num_leaning_changes: int = counted(
        "Times that this router changed a worker's leaning.", metric="leaning_changes", total="leaning_changes"
    )
    num_divisions: int = counted(
        "Times that this router began to divide the work: some workers only generate, the others only compute prompts.",
        metric="divisions",
        total="divisions",
    )

    def count_move(self, reason: str | None) -> None:
        """Count a sequence that left its decode replica by an order with a reason, or (None) because of a drain."""
        if reason is None:
            self.num_drain_moves += 1
        else:
            name = f"num_{'ordered' if reason == 'order' else reason}_moves"
            setattr(self, name, getattr(self, name) + 1)

    def note_placed(self, reason: Reason | None) -> None:
        """Count a sequence that was placed for this reason; None: it followed another one."""
        name = f"num_placed_{reason or Reason.LEADER}"
        setattr(self, name, getattr(self, name) + 1)

    def mean_output_tokens(self) -> float:
        """Mean output tokens of finished sequences."""
        return self.num_generated_tokens / self.num_finished if self.num_finished else TYPICAL_OUTPUT_TOKENS

    def plus(self, other: RouterCounters) -> RouterCounters:
        """The sums of both."""
        return RouterCounters(
            **{item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(RouterCounters)}
        )


ROUTER_COUNTERS: Mapping[str, Counted] = counters_of(RouterCounters)
"""All counters of a router, by the names of their fields."""
