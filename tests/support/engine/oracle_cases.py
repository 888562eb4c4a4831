"""Prompts with the greedy tokens that transformers generates for them: every path through Baton must give the same."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from tests.support.cluster.served_checkpoint import make_served_checkpoint
from tests.support.engine.checkpoints import VOCAB_SIZE, load_oracle, oracle_greedy

NUM_TOKENS = 64
BLOCK_SIZE = 16
PROMPT_LENGTHS = (1, 2, 15, 16, 17, 32, 33, 48, 100, 129, 200, 333, 448, 512, 640, 700)
"""Some end exactly at a block's border, or one token before or after it; most are longer than the tests' chunk budgets.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleCase:
    """A checkpoint, with its reference outputs for some prompts."""

    path: Path
    prompts: tuple[tuple[int, ...], ...]
    expected: tuple[tuple[int, ...], ...]


def make_prompts(seed: int) -> tuple[tuple[int, ...], ...]:
    """One prompt of every length; those at odd places continue the one before, so that they share its prefix."""
    rng = random.Random(seed)
    prompts: list[tuple[int, ...]] = []
    for place, length in enumerate(PROMPT_LENGTHS):
        shared = prompts[-1] if place % 2 else ()
        prompts.append(shared + tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(length - len(shared))))
    return tuple(prompts)


def make_case(path: Path, architecture: str, *, seed: int = 0) -> OracleCase:
    """Write a random checkpoint that a cluster can serve too, and ask transformers."""
    make_served_checkpoint(path, architecture, seed=seed)
    model = load_oracle(path)
    prompts = make_prompts(seed)
    expected = tuple(tuple(oracle_greedy(model, list(prompt), NUM_TOKENS)) for prompt in prompts)
    return OracleCase(path=path, prompts=prompts, expected=expected)
