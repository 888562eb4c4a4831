"""The replica that would get to the prompt first."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.candidate import Ask, CandidateT
from router.policies.ties import NUM_QUEUED, PROMISED_USAGE, lowest


def fewest_queued_tokens(candidates: Sequence[CandidateT], _: Ask, /) -> CandidateT:
    """Fewest prompt tokens waiting; ties by queue, then by KV usage, then by name."""
    return lowest(candidates, [item.queued_tokens for item in candidates], NUM_QUEUED, PROMISED_USAGE)
