"""The role of prefill workers: they compute prompts, sample first tokens, and keep the KV until it was read."""

from __future__ import annotations

from engine.contract.role import LoadMeasure, Role

PREFILL = Role(
    name="prefill",
    measure=LoadMeasure.QUEUED_TOKENS,
    policy="prefix",
    hands_over_to=("decode",),
    decodes=False,
    prompt_share=1.0,
)
