"""Session affinity: the replica to which all requests of a session go, while it is there and not overloaded."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from router.policies.candidate import CandidateT


def home_of(candidates: Sequence[CandidateT], session_id: str) -> CandidateT:
    """The session's replica by rendezvous hashing: no table, the same at every router, and when a replica goes, only
    its own sessions move.

    Source: Thaler and Ravishankar, Using Name-Based Mappings to Increase Hit Rates, 1998.
    """
    seed = xxhash.xxh3_64_intdigest(session_id.encode())
    digest = xxhash.xxh3_64_intdigest
    weights = [digest(item.replica_id.encode(), seed) for item in candidates]
    return candidates[weights.index(max(weights))]


def is_overloaded(
    replica: CandidateT, candidates: Sequence[CandidateT], *, max_usage_lead: float, max_queue_lead: int
) -> bool:
    """True when it is that much fuller than the emptiest candidate, or that many tokens further behind."""
    if replica.promised_usage > max_usage_lead + min([item.promised_usage for item in candidates]):
        return True
    return replica.queued_tokens > max_queue_lead + min([item.queued_tokens for item in candidates])
