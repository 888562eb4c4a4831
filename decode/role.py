"""The role of decode workers: they read the KV of prompts that were computed elsewhere, and generate the rest."""

from __future__ import annotations

from engine.contract.role import LoadMeasure, Role, Work

DECODE = Role(
    name="decode",
    prefers=(Work.STREAM,),
    measure=LoadMeasure.KV_USAGE,
    policy="kv_usage",
    prompt_share=0.25,
)
