"""Policies that trade cached prefixes against load, in each role's own unit."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.candidate import Ask, CandidateT
from router.policies.least_loaded import NUM_QUEUED, PROMISED_USAGE, lowest

MAX_USAGE_BONUS = 0.05
"""By how much a decode replica that has a whole prompt cached may be fuller than the emptiest one and still be chosen.

Replicas that the policy fills are therefore at most about this far apart."""


def least_work(candidates: Sequence[CandidateT], ask: Ask, /) -> CandidateT:
    """For prefill: the fewest tokens to compute until this prompt is done, without cached ones.

    Load and cache are both in tokens, so no weight has to be chosen. Ties by queue, then by KV usage, then by name.
    """
    if not ask.cached_tokens:
        work = [item.queued_tokens for item in candidates]
    else:
        cached = ask.cached_tokens.get
        work = [item.queued_tokens - cached(item.replica_id, 0) for item in candidates]
    return lowest(candidates, work, NUM_QUEUED, PROMISED_USAGE)


def least_usage_with_bonus(candidates: Sequence[CandidateT], ask: Ask, /) -> CandidateT:
    """For decode: the lowest KV usage, minus up to ``MAX_USAGE_BONUS`` for the share of the prompt that is cached.

    Cached blocks need no transfer and no second copy. Ties by queue, then by name.
    """
    if not ask.cached_tokens or not ask.num_tokens:
        usage = [item.promised_usage for item in candidates]
    else:
        cached, scale = ask.cached_tokens.get, MAX_USAGE_BONUS / ask.num_tokens
        usage = [item.promised_usage - scale * cached(item.replica_id, 0) for item in candidates]
    return lowest(candidates, usage, NUM_QUEUED)
