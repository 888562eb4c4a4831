"""One candidate out of many by several criteria in turn: each looks only at those that the ones before left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from router.policies.candidate import CandidateT

NUM_QUEUED: Callable[[Any], float] = attrgetter("num_queued")
PROMISED_USAGE: Callable[[Any], float] = attrgetter("promised_usage")
_NAME: Callable[[Any], str] = attrgetter("replica_id")


def lowest(candidates: Sequence[CandidateT], values: Sequence[float], *then: Callable[[Any], float]) -> CandidateT:
    """The candidate with the lowest value; of several, the one with the lowest of what ``then`` reads; then by name."""
    left = _with_lowest(candidates, values)
    for read in then:
        if len(left) == 1:
            break
        left = _with_lowest(left, list(map(read, left)))
    return left[0] if len(left) == 1 else min(left, key=_NAME)


def _with_lowest(candidates: Sequence[CandidateT], values: Sequence[float]) -> Sequence[CandidateT]:
    least = min(values)
    num_least = values.count(least)
    if num_least == 1:
        return (candidates[values.index(least)],)
    if num_least == len(values):
        return candidates
    return [item for item, value in zip(candidates, values, strict=True) if value == least]
