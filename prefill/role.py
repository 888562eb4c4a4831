"""The role of prefill workers: they compute prompts, sample first tokens, and keep the KV until it was read."""

from __future__ import annotations

from engine.contract.role import LoadMeasure, Role, Work

PREFILL = Role(
    name="prefill",
    prefers=(Work.PROMPT,),
    measure=LoadMeasure.QUEUED_TOKENS,
    policy="prefix",
    prompt_share=1.0,
)
