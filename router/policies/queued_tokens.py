"""The replica that would get to the prompt first."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.candidate import CandidateT


def fewest_queued_tokens(candidates: Sequence[CandidateT], /) -> CandidateT:
    """Fewest prompt tokens waiting; ties by queue, then by KV usage, then by name."""
    return min(
        candidates,
        key=lambda item: (item.queued_tokens, item.num_queued, item.promised_usage, item.replica_id),
    )
