"""Which logits processors there are, in the order in which they change the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from engine.sampling.processors.allowed_tokens import AllowedTokens
from engine.sampling.processors.bad_words import BadWords
from engine.sampling.processors.logit_bias import LogitBias
from engine.sampling.processors.min_tokens import MinTokens
from engine.sampling.processors.penalties import Penalties
from engine.sampling.processors.processor import LogitsProcessor

PROCESSORS: Final[tuple[Callable[[int], LogitsProcessor], ...]] = (
    LogitBias,
    Penalties,
    BadWords,
    MinTokens,
    AllowedTokens,
)
"""Each is built with the number of rows. Masks come after sums and products, and what is impossible comes last. Behind
them all come grammars, which change no logits: they say which of them count (``GrammarRows``)."""


def build_processors(max_num_seqs: int) -> tuple[LogitsProcessor, ...]:
    """One of each, for rows 0 to ``max_num_seqs`` - 1."""
    return tuple(build(max_num_seqs) for build in PROCESSORS)
