"""Proposers of draft tokens: without a model, or with a given probability of being right."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

from engine.drafting.proposer import Draft, DraftContext, Drafting


class RepeatLast:
    """Implements ``Proposer``: predicts that the last token repeats."""

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """Propose as many drafts as allowed."""
        return [Draft([int(context.token_ids[-1])] * context.max_tokens) for context in contexts]


class SometimesRight:
    """Implements ``Proposer`` for known outputs: each draft is right with a given probability.

    ``next_token`` gives the token that follows a request's tokens; wrong guesses are the number after it. It proposes
    any number of tokens, none among them, or with ``proposes_all`` as many as may be.
    """

    def __init__(
        self,
        next_token: Callable[[str, list[int]], int],
        *,
        probability: float,
        proposes_all: bool = False,
        seed: int = 0,
    ) -> None:
        self._next_token = next_token
        self._probability = probability
        self._proposes_all = proposes_all
        self._random = random.Random(seed)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """Drafts for each context."""
        return [Draft(self._guess(context)) for context in contexts]

    def _guess(self, context: DraftContext) -> list[int]:
        tokens = context.token_ids.tolist()
        num_known = len(tokens)
        least = context.max_tokens if self._proposes_all else 0
        for _ in range(self._random.randint(least, context.max_tokens)):
            is_right = self._random.random() < self._probability
            tokens.append(self._next_token(context.request_id, tokens) + (not is_right))
        return tokens[num_known:]


def repeat_last(max_draft_tokens: int) -> Drafting:
    """Drafts that repeat the last token."""
    return Drafting(proposer=RepeatLast(), max_draft_tokens=max_draft_tokens)


class Recorded:
    """Recorded outputs as a ``next_token`` function: continues the first record that begins with the given tokens."""

    def __init__(self, records: Sequence[Sequence[int]] = ()) -> None:
        self._records = [list(record) for record in records]

    def add(self, record: Sequence[int]) -> None:
        """A prompt and its output."""
        self._records.append(list(record))

    def __call__(self, _request_id: str, tokens: list[int]) -> int:
        """The next token; 0 if nothing was recorded."""
        length = len(tokens)
        found = (record[length] for record in self._records if len(record) > length and record[:length] == tokens)
        return next(found, 0)


class Remembering:
    """Implements ``Proposer``: predicts that a request continues like an earlier one with the same first tokens.

    A request's first guesses are all right; of the next ones the last is wrong, then the last but one as well, and so
    on in turn. Nothing is left to chance: also a short answer accepts some.
    Of a request it knows what it was asked for: all tokens but the last ones.
    """

    def __init__(self) -> None:
        self._known: dict[str, list[int]] = {}
        self._num_asked: Counter[str] = Counter()

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """Drafts for each context; remembers the contexts."""
        self._known.update({context.request_id: context.token_ids.tolist() for context in contexts})
        return [Draft(self._guess(context, Recorded(list(self._known.values())))) for context in contexts]

    def _guess(self, context: DraftContext, next_token: Recorded) -> list[int]:
        tokens = context.token_ids.tolist()
        num_known = len(tokens)
        num_wrong = self._num_asked[context.request_id] % (context.max_tokens + 1)
        self._num_asked[context.request_id] += 1
        for place in range(context.max_tokens):
            is_wrong = place >= context.max_tokens - num_wrong
            tokens.append(next_token(context.request_id, tokens) + is_wrong)
        return tokens[num_known:]
