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

ProcessorFactory = Callable[[int], LogitsProcessor]
"""Builds a processor for that many rows."""

PROCESSORS: Final[tuple[ProcessorFactory, ...]] = (
    LogitBias,
    Penalties,
    BadWords,
    MinTokens,
    AllowedTokens,
)
"""Masks come after sums and products, and what is impossible comes last. Behind
them all come grammars, which change no logits: they say which of them count (``GrammarRows``)."""
