"""The role of mixed workers: they take prompts and streams alike, each as it comes, beside pools for one of the two."""

from __future__ import annotations

from engine.contract.role import LoadMeasure, Role, Work

MIXED = Role(
    name="mixed",
    prefers=(Work.PROMPT, Work.STREAM),
    measure=LoadMeasure.KV_USAGE,
    policy="kv_usage",
    prompt_share=0.5,
)
