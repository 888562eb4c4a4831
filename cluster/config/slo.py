"""What requests are promised, in the configuration."""

from __future__ import annotations

from pydantic import Field

from cluster.config.config_section import Section
from engine.contract.promise import MAX_PROMISE_MS


class SLOSection(Section):
    """What requests are promised that ask for nothing else; null promises nothing."""

    ttft_ms: float | None = Field(default=None, gt=0, le=MAX_PROMISE_MS, description="Milliseconds to the first token.")
    itl_ms: float | None = Field(
        default=None,
        gt=0,
        le=MAX_PROMISE_MS,
        description="Milliseconds between tokens: a step takes as many prompt tokens as keep it under that while "
        "requests generate, whatever `max_num_batched_tokens` allows.",
    )
