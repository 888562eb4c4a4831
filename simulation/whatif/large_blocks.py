"""Blocks as large as a load's prompts allow: what is simulated of a long prompt is mostly its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from simulation.layout import Layout, Pool
from simulation.loads import Arrival

MAX_BLOCK_TOKENS = 128
BLOCKS_OF_PROMPT = 64
"""A mean prompt keeps so many: what is cached of it, and what it holds, is rounded to a block."""


def with_large_blocks(layout: Layout, arrivals: Sequence[Arrival]) -> Layout:
    """The layout with as many bytes of KV in larger blocks, where prompts are long. Elastic workers keep theirs: the
    least that one of their steps computes of a prompt is a block.
    """
    if layout.settings.is_elastic:
        return layout
    longest = min(MAX_BLOCK_TOKENS, fmean(len(arrival.prompt) for arrival in arrivals) / BLOCKS_OF_PROMPT)
    return replace(layout, prefill=_with(layout.prefill, longest), decode=_with(layout.decode, longest))


def _with(pool: Pool, longest: float) -> Pool:
    machine = pool.machine
    factor = 1
    while 2 * factor * machine.block_size <= longest and machine.num_blocks // (2 * factor) >= pool.most_running:
        factor *= 2
    larger = replace(machine, block_size=factor * machine.block_size, num_blocks=max(machine.num_blocks // factor, 1))
    return replace(pool, machine=larger)
