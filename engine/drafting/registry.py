"""Who proposes draft tokens, by the name in the configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from engine.contract.config import SpeculativeConfig
from engine.drafting.predicted_text import MAX_PREDICTED_TOKENS, PredictedText
from engine.drafting.prompt_lookup import PromptLookup
from engine.drafting.proposer import Drafting, Proposer
from engine.drafting.suffix_lookup import SuffixLookup

MAX_AUTO_TOKENS: Final = 8
"""More drafts than that are seldom all right."""


def make_drafting(config: SpeculativeConfig) -> Drafting | None:
    """The proposer that was asked for; None where nobody proposes."""
    proposer = _proposer(config)
    if proposer is None:
        return None
    if config.num_tokens == "auto":
        return Drafting(proposer=proposer, max_draft_tokens=MAX_AUTO_TOKENS, is_adaptive=True)
    return Drafting(proposer=proposer, max_draft_tokens=config.num_tokens)


def with_predictions(drafting: Drafting | None, config: SpeculativeConfig) -> Drafting:
    """The same, where requests may also bring predictions of their outputs, which draft for them alone."""
    most = MAX_PREDICTED_TOKENS if config.num_tokens == "auto" else config.num_tokens
    if drafting is None:
        return Drafting(
            proposer=PredictedText(),
            max_draft_tokens=most,
            serves_all=False,
            is_adaptive=config.num_tokens == "auto",
        )
    return replace(drafting, proposer=PredictedText(drafting.proposer), max_predicted_tokens=most)


def _proposer(config: SpeculativeConfig) -> Proposer | None:
    match config.method:
        case "none":
            return None
        case "ngram":
            return PromptLookup(min_match=config.min_match, max_match=config.max_match)
        case "suffix":
            return SuffixLookup(
                min_match=config.min_match, max_match=config.max_match, max_kept_tokens=config.max_kept_tokens
            )
