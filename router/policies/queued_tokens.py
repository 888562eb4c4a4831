"""The replica that would get to the prompt first."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.candidate import Ask, CandidateT


def fewest_queued_tokens(candidates: Sequence[CandidateT], _: Ask, /) -> CandidateT:
    """Fewest prompt tokens waiting; ties by queue, then by KV usage, then by name."""
    fewest = min([item.queued_tokens for item in candidates])
    tied = [item for item in candidates if item.queued_tokens == fewest]
    if len(tied) == 1:
        return tied[0]
    return min(tied, key=lambda item: (item.num_queued, item.promised_usage, item.replica_id))
