"""Which draft tokens are accepted: those that equal the tokens drawn at their positions, up to the first difference.

The draw at a position depends only on the tokens before it and on (seed, position). So it is the token that would come
without drafts, at any temperature. Rejection sampling (Leviathan et al., Fast Inference from Transformers via
Speculative Decoding, ICML 2023) preserves the distribution of the tokens; this preserves the tokens themselves.
"""

from __future__ import annotations

import numpy as np

from engine.contract.step import BoolArray, IntArray


def count_accepted(sampled_token_ids: IntArray, num_samples: IntArray, draft_token_ids: IntArray) -> IntArray:
    """[num_reqs] how many draft tokens of each row are accepted.

    sampled_token_ids: [sum of num_samples] the drawn tokens, rows back to back; draft_token_ids: the ``num_samples -
        1`` drafts of each row that samples, also back to back.
    """
    num_drafts = np.maximum(num_samples - 1, 0)
    owners = np.repeat(np.arange(num_samples.size), num_drafts)
    places = np.arange(draft_token_ids.size) - (np.cumsum(num_drafts) - num_drafts)[owners]
    drawn = sampled_token_ids[(np.cumsum(num_samples) - num_samples)[owners] + places]
    wrong = np.flatnonzero(drawn != draft_token_ids)
    num_accepted: IntArray = num_drafts.astype(np.int32)
    np.minimum.at(num_accepted, owners[wrong], places[wrong].astype(np.int32))
    return num_accepted


def is_output(num_samples: IntArray, num_accepted: IntArray) -> BoolArray:
    """[sum of num_samples] True for the samples that are output: the accepted drafts, and the one after them."""
    places = np.arange(num_samples.sum()) - np.repeat(np.cumsum(num_samples) - num_samples, num_samples)
    counts: BoolArray = places <= np.repeat(num_accepted, num_samples)
    return counts
