"""Draft tokens from a request's own tokens: what followed the last time that the same tokens occurred in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.contract.step import IntArray
from engine.drafting.proposer import Draft, DraftContext

NO_TOKENS: IntArray = np.empty(0, np.int32)


class Match(NamedTuple):
    """The last ``length`` tokens occurred before, followed by ``token_ids``."""

    length: int
    token_ids: IntArray

    @property
    def draft(self) -> Draft:
        """The match as a draft; each doubling of the length is an evidence class of its own."""
        return Draft(self.token_ids, self.length.bit_length())


NO_MATCH = Match(0, NO_TOKENS)
NO_DRAFT = Draft(NO_TOKENS)


class PromptLookup:
    """Implements ``Proposer`` for answers that quote their prompt or themselves. Keeps nothing between steps.

    Source: prompt lookup decoding, Saxena 2023.
    """

    def __init__(self, *, min_match: int = 2, max_match: int = 16) -> None:
        """From ``min_match`` to ``max_match`` of the last tokens must be found again; more are preferred."""
        self._min_match = min_match
        self._max_match = max_match

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """See ``Proposer``."""
        return [self._draft(context) for context in contexts]

    def _draft(self, context: DraftContext) -> Draft:
        match = longest_match(context.token_ids, max_match=self._max_match, max_tokens=context.max_tokens)
        return match.draft if match.length >= self._min_match else NO_DRAFT


def longest_match(token_ids: IntArray, *, max_match: int, max_tokens: int) -> Match:
    """Find the longest earlier occurrence of the last tokens, up to ``max_match`` of them; of several, the latest.

    If it is so close to the end that fewer than ``max_tokens`` tokens follow, the tokens repeat themselves, and the
    repetition is assumed to go on.
    """
    num_tokens = token_ids.size
    last = num_tokens - 1
    ends = np.flatnonzero(token_ids[:last] == token_ids[last])
    if ends.size == 0:
        return NO_MATCH
    length = 1
    while length < max_match:
        longer = ends[ends >= length]
        longer = longer[token_ids[longer - length] == token_ids[last - length]]
        if longer.size == 0:
            break
        ends, length = longer, length + 1
    follows = token_ids[int(ends[-1]) + 1 :]
    return Match(length, np.resize(follows, max_tokens) if follows.size < max_tokens else follows[:max_tokens])
