"""What a worker tells of a request's way to its first token there, and what a request says of who traces it.

Times are in seconds after the request came to the engine, by the engine's own clock. Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_STEPS = 32
"""So many of a prompt's steps are told one by one; those behind are told as one with the last of them."""

MAX_LOADS = 8
"""So many of a request's loads are told, the first ones: only one whose KV is lost over and over has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """A request that brings this is traced: the engine tells its ``RequestTimings``.

    ``traceparent`` and ``tracestate`` are W3C's headers of the span in which a worker's own spans lie; empty where no
    spans are wanted.
    """

    traceparent: str = ""
    tracestate: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """A step that computed known tokens of the request, or ``num_steps`` of them that followed each other."""

    start_s: float
    duration_s: float
    num_tokens: int
    num_steps: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTiming:
    """KV that was read for the request, as the connector of the engine that read it saw it.

    ``num_bytes`` are those that came, also of blocks that had come before the load was ordered, while the prompt was
    computed. ``source`` is the engine that they were read from; empty where it was a tier.
    """

    start_s: float
    duration_s: float
    num_bytes: int
    num_blocks: int
    num_failed_blocks: int = 0
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimings:
    """Told once, with the request's first token on an engine, which came after ``first_token_s``."""

    request_id: str
    first_token_s: float
    queue_s: float = 0.0
    loads: tuple[LoadTiming, ...] = ()
    steps: tuple[StepTiming, ...] = ()
