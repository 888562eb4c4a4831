"""The replica with the lowest KV usage."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.candidate import Ask, CandidateT


def lowest_kv_usage(candidates: Sequence[CandidateT], _: Ask, /) -> CandidateT:
    """Smallest share of blocks in use after reservations; ties by queue, then by name.

    A share and not a number of free blocks, so that replicas of different size fill up evenly.
    """
    lowest = min([item.promised_usage for item in candidates])
    tied = [item for item in candidates if item.promised_usage == lowest]
    return tied[0] if len(tied) == 1 else min(tied, key=lambda item: (item.num_queued, item.replica_id))
