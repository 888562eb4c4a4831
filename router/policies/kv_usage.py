"""The replica with the lowest KV usage."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.candidate import Ask, CandidateT
from router.policies.ties import NUM_QUEUED, lowest


def lowest_kv_usage(candidates: Sequence[CandidateT], _: Ask, /) -> CandidateT:
    """Smallest share of blocks in use after reservations; ties by queue, then by name.

    A share and not a number of free blocks, so that replicas of different size fill up evenly.
    """
    return lowest(candidates, [item.promised_usage for item in candidates], NUM_QUEUED)
