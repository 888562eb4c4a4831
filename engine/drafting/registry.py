"""Makes the proposer of draft tokens that the configuration names."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from engine.contract.config import SpeculativeConfig
from engine.drafting.predicted_text import MAX_PREDICTED_TOKENS, PredictedText
from engine.drafting.prompt_lookup import PromptLookup
from engine.drafting.proposer import Drafting, ModelProposer, Proposer
from engine.drafting.suffix_lookup import SuffixLookup

MAX_AUTO_TOKENS: Final = 8
"""The most drafts with ``auto``: more are seldom all right."""


def make_drafting(config: SpeculativeConfig, *, model: ModelProposer | None = None) -> Drafting | None:
    """The proposer that was asked for, with the draft model if there is one; None where nothing proposes."""
    proposer = _proposer(config) if model is None else PredictedText()
    if proposer is None:
        return None
    return Drafting(
        proposer=proposer,
        model=model,
        max_draft_tokens=most_draft_tokens(config),
        is_adaptive=config.num_tokens == "auto",
    )


def most_draft_tokens(config: SpeculativeConfig) -> int:
    """The most drafts of a request in a step, apart from those of a prediction."""
    return MAX_AUTO_TOKENS if config.num_tokens == "auto" else config.num_tokens


def with_predictions(drafting: Drafting | None, config: SpeculativeConfig) -> Drafting:
    """The same drafting, where requests may also bring predictions of their outputs, which serve as drafts for them."""
    most = MAX_PREDICTED_TOKENS if config.num_tokens == "auto" else config.num_tokens
    if drafting is None:
        return Drafting(
            proposer=PredictedText(),
            max_draft_tokens=most,
            serves_all=False,
            is_adaptive=config.num_tokens == "auto",
        )
    proposer = drafting.proposer
    if not isinstance(proposer, PredictedText):
        proposer = PredictedText(proposer)
    return replace(drafting, proposer=proposer, max_predicted_tokens=most)


def _proposer(config: SpeculativeConfig) -> Proposer | None:
    match config.method:
        case "none" | "draft_model":
            return None
        case "ngram":
            return PromptLookup(min_match=config.min_match, max_match=config.max_match)
        case "suffix":
            return SuffixLookup(
                min_match=config.min_match, max_match=config.max_match, max_kept_tokens=config.max_kept_tokens
            )
