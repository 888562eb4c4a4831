"""What a request was promised: how soon its first token comes, and how far apart the others are. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """Bounds that scheduling and routing aim at; None promises nothing. Missing one costs no request anything.

    ttft_ms: milliseconds until the first token.
    itl_ms: milliseconds between tokens (inter-token latency).
    """

    ttft_ms: float | None = None
    itl_ms: float | None = None


NO_PROMISE = Promise()
