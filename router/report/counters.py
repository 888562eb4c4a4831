"""What this router counted since its start."""

from __future__ import annotations

from dataclasses import dataclass, fields

from router.versions import take_state


@dataclass(slots=True, kw_only=True)
class RouterCounters:
    """Sequences and tokens. ``num_failed`` ended with an error, ``num_cancelled`` were given up by their client.

    ``num_refused`` were refused when they came because too many were there; they are not in ``num_requests``.

    ``num_migrations`` went on at another decode worker after theirs was lost, ``num_drain_moves`` because theirs let
    them go.
    """

    num_requests: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_refused: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_prefill_retries: int = 0
    num_migrations: int = 0
    num_drain_moves: int = 0
    num_local_prefills: int = 0

    __setstate__ = take_state

    def plus(self, other: RouterCounters) -> RouterCounters:
        """The sums of both."""
        return RouterCounters(
            **{item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(RouterCounters)}
        )
