"""The names of spans that routers and workers both use."""

from __future__ import annotations

from typing import Final

SERVER: Final = "llm_request"
"""A request from its first byte to its last token, as vLLM names it."""

PREFILL: Final = "prefill"
DECODE: Final = "decode"
GENERATE: Final = "generate"
QUEUE: Final = "queue"
KV_TRANSFER: Final = "kv_transfer"
STEP: Final = "step"


def call_name(*, hands_over: bool, goes_on: bool) -> str:
    """The name of a call to a worker: compute a prompt and hand it over, continue after a prompt, or do both."""
    if hands_over:
        return PREFILL
    return DECODE if goes_on else GENERATE
