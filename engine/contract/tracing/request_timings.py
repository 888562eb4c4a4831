"""What a worker reports about a request up to its first token there, and how a request says that it is traced.

Times are seconds since the request came to the engine, by the engine's own clock. Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_STEPS = 32
"""This many of a prompt's steps are reported; later ones are merged into the last entry."""

MAX_LOADS = 8
"""This many of a request's loads are reported, the first ones: more happen only if its KV is lost over and over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """A request with this is traced: the engine reports its ``RequestTimings``.

    ``traceparent`` and ``tracestate`` are the W3C headers of the span that contains the worker's own spans; empty where
    no spans are wanted.
    """

    traceparent: str = ""
    tracestate: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """A step that computed known tokens of the request, or ``num_steps`` consecutive ones of them."""

    start_s: float
    duration_s: float
    num_tokens: int
    num_steps: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTiming:
    """KV that was read for the request, as seen by the connector of the engine that read it.

    ``num_bytes`` are the bytes that came, also those of blocks read early, before the load was ordered. ``source`` is
    the engine that they were read from; empty for a tier.
    """

    start_s: float
    duration_s: float
    num_bytes: int
    num_blocks: int
    num_failed_blocks: int = 0
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimings:
    """Sent once, with the request's first token on an engine, which came after ``first_token_s``."""

    request_id: str
    first_token_s: float
    queue_s: float = 0.0
    loads: tuple[LoadTiming, ...] = ()
    steps: tuple[StepTiming, ...] = ()
