"""Drafts out of what callers predict of their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engine.drafting.prompt_lookup import NO_DRAFT
from engine.drafting.proposer import Draft, DraftContext, Proposer

MAX_PREDICTED_TOKENS: Final = 32
"""With ``auto``: what a caller predicts is right for longer than what is guessed."""

FIRST_EVIDENCE: Final = 32
"""Behind the evidence of any other proposer: a prediction is judged by itself."""


class PredictedText:
    """Implements ``Proposer`` for requests that come with a prediction; all others are left to ``others``.

    While an answer is somewhere else than its prediction, ``others`` are asked for it, too. Where an answer stands is
    kept by its request.
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
