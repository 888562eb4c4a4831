"""The role of decode workers: they read the KV of prompts that were computed elsewhere, and generate the rest."""

from __future__ import annotations

from engine.contract.role import LoadMeasure, Role

DECODE = Role(
    name="decode",
    measure=LoadMeasure.KV_USAGE,
    policy="kv_usage",
    hands_over_to=("decode",),
    decodes=True,
    prompt_share=0.25,
)
