"""Draft tokens from what callers predict of their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engine.drafting.prompt_lookup import NO_DRAFT
from engine.drafting.proposer import Draft, DraftContext, Proposer

MAX_PREDICTED_TOKENS: Final = 32
"""The most drafts with ``auto``: a caller's prediction stays right for longer than a proposer's guess."""

FIRST_EVIDENCE: Final = 32
"""Evidence class of predictions, above that of all other proposers: their acceptance is kept apart."""


class PredictedText:
    """Implements ``Proposer`` for requests that come with a prediction; ``others`` propose for all other requests.

    While an answer is off its prediction, ``others`` propose for it, too. The request itself keeps its place in the
    prediction.
    """

    def __init__(self, others: Proposer | None = None) -> None:
        self._others = others

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """See ``Proposer``."""
        drafts = [self._draft(context) for context in contexts]
        if self._others is None:
            return drafts
        open_places = [place for place, draft in enumerate(drafts) if not len(draft.token_ids)]
        if open_places:
            others = self._others.propose([contexts[place] for place in open_places])
            for place, draft in zip(open_places, others, strict=True):
                drafts[place] = draft
        return drafts

    @staticmethod
    def _draft(context: DraftContext) -> Draft:
        follower = context.prediction
        if follower is None:
            return NO_DRAFT
        follower.follow(context.token_ids[context.num_prompt_tokens + follower.num_tokens :].tolist())
        return Draft(
            follower.expected(context.max_tokens), evidence=FIRST_EVIDENCE + follower.num_followed.bit_length()
        )
