"""Draft tokens from this engine's earlier answers: what followed the longest match of a request's last tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.drafting.prompt_lookup import NO_DRAFT, NO_MATCH, Match, longest_match
from engine.drafting.proposer import Draft, DraftContext

KEY_TOKENS = 3
"""Answers are indexed by this many tokens; shorter sequences occur everywhere."""

MAX_PLACES = 8
"""How many places are kept of each key, the latest ones."""

Key = tuple[str | None, int, int, int]


@dataclass(slots=True, eq=False)
class _Answer:
    """The output of one request, as far as it was seen."""

    salt: str | None
    token_ids: list[int] = field(default_factory=list)


class SuffixLookup:
    """Implements ``Proposer`` for answers that resemble others, above all agents' loops and retries.

    It searches the request's own tokens and the answers of all requests with the same cache salt, running ones
    included, for the longest match of the request's last tokens. A longer match makes more drafts: as many as tokens
    matched. The answers seen last are kept, ``max_kept_tokens`` in all.

    Source: the idea is that of SuffixDecoding, Oliaro et al. 2024; an index by three tokens takes the tree's place.
    """

    def __init__(self, *, min_match: int = 2, max_match: int = 16, max_kept_tokens: int = 1_000_000) -> None:
        self._min_match = min_match
        self._max_match = max_match
        self._max_kept_tokens = max_kept_tokens
        self._answers: OrderedDict[tuple[str | None, str], _Answer] = OrderedDict()  # by salt and request
        self._places: dict[Key, list[tuple[_Answer, int]]] = {}
        self._num_kept_tokens = 0

    @property
    def num_kept_tokens(self) -> int:
        """Tokens of answers that are kept now."""
        return self._num_kept_tokens

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """See ``Proposer``."""
        if self._max_kept_tokens:
            for context in contexts:
                self._learn(context)
            self._forget_oldest()
        return [self._draft(context) for context in contexts]

    def _draft(self, context: DraftContext) -> Draft:
        own = longest_match(context.token_ids, max_match=self._max_match, max_tokens=context.max_tokens)
        match = max(self._match_answers(context), own, key=lambda found: found.length)
        if match.length < self._min_match:
            return NO_DRAFT
        return match.draft._replace(token_ids=match.token_ids[: match.length])

    def _learn(self, context: DraftContext) -> None:
        """Keep the tokens that the request has generated since it was last seen."""
        name = context.salt, context.request_id
        answer = self._answers.setdefault(name, _Answer(context.salt))
        self._answers.move_to_end(name)
        kept = answer.token_ids
        num_before = len(kept)
        kept.extend(context.token_ids[context.num_prompt_tokens + num_before :].tolist())
        self._num_kept_tokens += len(kept) - num_before
        for stop in range(max(num_before, KEY_TOKENS), len(kept)):
            places = self._places.setdefault(_key(answer.salt, kept, stop), [])
            places.append((answer, stop))
            if len(places) > MAX_PLACES:
                del places[0]

    def _forget_oldest(self) -> None:
        while self._num_kept_tokens > self._max_kept_tokens:
            _, answer = self._answers.popitem(last=False)
            self._num_kept_tokens -= len(answer.token_ids)
            for stop in range(KEY_TOKENS, len(answer.token_ids)):
                key = _key(answer.salt, answer.token_ids, stop)
                left = [place for place in self._places.get(key, ()) if place[0] is not answer]
                if left:
                    self._places[key] = left
                else:
                    self._places.pop(key, None)

    def _match_answers(self, context: DraftContext) -> Match:
        """The longest match in another request's answer; of several, the latest."""
        tail = context.token_ids[-self._max_match :].tolist()
        if len(tail) < KEY_TOKENS:
            return NO_MATCH
        longest, found = 0, None
        own = self._answers.get((context.salt, context.request_id))
        for answer, stop in reversed(self._places.get(_key(context.salt, tail, len(tail)), ())):
            if answer is own:
                continue
            length = _common_suffix(answer.token_ids, stop, tail)
            if length > longest:
                longest, found = length, (answer, stop)
        if found is None:
            return NO_MATCH
        answer, stop = found
        return Match(longest, np.array(answer.token_ids[stop : stop + context.max_tokens], np.int32))


def _key(salt: str | None, token_ids: Sequence[int], stop: int) -> Key:
    """The key of the place before ``stop``."""
    return salt, token_ids[stop - 3], token_ids[stop - 2], token_ids[stop - 1]


def _common_suffix(token_ids: Sequence[int], stop: int, tail: Sequence[int]) -> int:
    """How many tokens before ``stop`` equal the last ones of ``tail``."""
    length, most = 0, min(stop, len(tail))
    while length < most and token_ids[stop - 1 - length] == tail[-1 - length]:
        length += 1
    return length
