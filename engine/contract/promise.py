"""What a request was promised: its TTFT and its inter-token latency. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

MAX_PROMISE_MS = 3_600_000.0
"""An hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """Bounds that scheduling and routing aim at; None promises nothing. A missed promise has no effect on the request.

    ttft_ms: milliseconds until the first token.
    itl_ms: milliseconds between tokens (inter-token latency).
    """

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def over(self, other: Promise) -> Promise:
        """This promise; where it says nothing, what ``other`` says."""
        return Promise(
            ttft_ms=other.ttft_ms if self.ttft_ms is None else self.ttft_ms,
            itl_ms=other.itl_ms if self.itl_ms is None else self.itl_ms,
        )


NO_PROMISE = Promise()
