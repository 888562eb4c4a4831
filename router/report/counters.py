"""What this router counted since its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from kv_transfer.stats import Counted, counted, counters_of
from router.versions import across_versions


@across_versions
@dataclass(slots=True, kw_only=True)
class RouterCounters:
    """Sequences and tokens. ``num_failed`` ended with an error, ``num_cancelled`` were given up by their client.

    ``num_refused`` were refused when they came because too many were there; they are not in ``num_requests``.

    ``num_migrations`` went on at another decode worker after theirs was lost, ``num_drain_moves`` because theirs let
    them go.
    """

    num_requests: int = counted("Sequences accepted.", metric="requests", total="requests")
    num_finished: int = counted(total="finished")
    num_failed: int = counted(total="failed")
    num_cancelled: int = counted(total="cancelled")
    num_refused: int = counted(
        "Sequences turned away because too many were in progress or waiting.",
        metric="requests_refused",
        total="refused",
    )
    num_generated_tokens: int = counted(total="tokens")
    num_prompt_tokens: int = counted(total="prompt_tokens")
    num_prefill_retries: int = counted(
        "Prompts sent to another prefill replica.", metric="prefill_retries", total="prefill_retries"
    )
    num_migrations: int = counted(
        "Sequences that went on at another decode replica after theirs was lost.",
        metric="migrations",
        total="migrations",
    )
    num_drain_moves: int = counted(
        "Sequences moved away from a draining decode replica, with their KV.", metric="drain_moves", total="drain_moves"
    )
    num_local_prefills: int = counted(
        "Prompts that decode computed because prefill was lost or far behind.",
        metric="local_prefills",
        total="local_prefills",
    )

    num_ttft_promises: int = counted(
        "Sequences that were promised their first token, and got it or failed.",
        metric="ttft_promises",
        total="ttft_promises",
    )
    num_ttft_kept: int = counted("Those that got it in time.", metric="ttft_promises_kept", total="ttft_promises_kept")
    num_itl_promises: int = counted(
        "Sequences of several tokens that were promised the time between these, and ended well.",
        metric="itl_promises",
        total="itl_promises",
    )
    num_itl_kept: int = counted("Those that kept it on average.", metric="itl_promises_kept", total="itl_promises_kept")

    def plus(self, other: RouterCounters) -> RouterCounters:
        """The sums of both."""
        return RouterCounters(
            **{item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(RouterCounters)}
        )


ROUTER_COUNTERS: Mapping[str, Counted] = counters_of(RouterCounters)
"""All counters of a router, by the names of their fields."""
