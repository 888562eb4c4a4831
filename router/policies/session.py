"""Session affinity: all requests of a session go to one replica while it is available and not overloaded."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from router.policies.candidate import CandidateT


def home_of(candidates: Sequence[CandidateT], session_id: str) -> CandidateT:
    """The session's replica by rendezvous hashing. It needs no table, is the same at every router, and if a replica
    goes, only its own sessions move.

    Source: Thaler and Ravishankar, Using Name-Based Mappings to Increase Hit Rates, 1998.
    """
    seed = xxhash.xxh3_64_intdigest(session_id.encode())
    digest = xxhash.xxh3_64_intdigest
    weights = [digest(item.replica_id.encode(), seed) for item in candidates]
    return candidates[weights.index(max(weights))]


def is_overloaded(
    replica: CandidateT, candidates: Sequence[CandidateT], *, max_usage_lead: float, max_queue_lead: int
) -> bool:
    """True if the replica exceeds the emptiest candidate's KV usage, or the shortest queue, by more than allowed."""
    if replica.promised_usage > max_usage_lead + min([item.promised_usage for item in candidates]):
        return True
    return replica.queued_tokens > max_queue_lead + min([item.queued_tokens for item in candidates])
