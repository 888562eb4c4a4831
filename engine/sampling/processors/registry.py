"""All logits processors, in the order in which they change the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from engine.sampling.processors.allowed_tokens import AllowedTokens
from engine.sampling.processors.bad_words import BadWords
from engine.sampling.processors.logit_bias import LogitBias
from engine.sampling.processors.min_tokens import MinTokens
from engine.sampling.processors.penalties import Penalties
from engine.sampling.processors.processor import LogitsProcessor
from engine.sampling.processors.repeated_ngrams import RepeatedNgrams

ProcessorFactory = Callable[[int], LogitsProcessor]
"""Builds a processor for a number of rows."""

PROCESSORS: Final[tuple[ProcessorFactory, ...]] = (
    LogitBias,
    Penalties,
    RepeatedNgrams,
    BadWords,
    MinTokens,
    AllowedTokens,
)
"""Masks come after additions and factors, and hard exclusions come last. Grammars follow after all of them: they do not
change logits, but restrict which logits count (``GrammarRows``)."""
