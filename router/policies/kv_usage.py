"""The replica with the lowest KV usage."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.candidate import CandidateT


def lowest_kv_usage(candidates: Sequence[CandidateT], /) -> CandidateT:
    """Smallest share of blocks in use after reservations; ties by queue, then by name.

    A share and not a number of free blocks, so that replicas of different size fill up evenly.
    """
    return min(candidates, key=lambda item: (item.promised_usage, item.num_queued, item.replica_id))
