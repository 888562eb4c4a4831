"""Policies by load: the lowest KV usage, the lower one of two at random, or the fewest waiting prompt tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from router.policies.candidate import Ask, CandidateT

NUM_QUEUED: Callable[[Any], float] = attrgetter("num_queued")
PROMISED_USAGE: Callable[[Any], float] = attrgetter("promised_usage")
_NAME: Callable[[Any], str] = attrgetter("replica_id")


def lowest_kv_usage(candidates: Sequence[CandidateT], _: Ask, /) -> CandidateT:
    """Smallest share of blocks in use after reservations; ties by queue, then by name.

    It compares shares, not numbers of free blocks, so that replicas of different size fill up evenly.
    """
    return lowest(candidates, [item.promised_usage for item in candidates], NUM_QUEUED)


class PowerOfTwo:
    """Two candidates at random, then the one with the lower KV usage.

    Source: Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001.
    """

    def __init__(self, source: random.Random | None = None) -> None:
        self._source = source or random.Random()

    def __call__(self, candidates: Sequence[CandidateT], ask: Ask, /) -> CandidateT:
        """The better one of two."""
        if len(candidates) <= 2:
            return lowest_kv_usage(candidates, ask)
        return lowest_kv_usage(self._source.sample(candidates, 2), ask)


def fewest_queued_tokens(candidates: Sequence[CandidateT], _: Ask, /) -> CandidateT:
    """Fewest prompt tokens waiting; ties by queue, then by KV usage, then by name."""
    return lowest(candidates, [item.queued_tokens for item in candidates], NUM_QUEUED, PROMISED_USAGE)


def lowest(candidates: Sequence[CandidateT], values: Sequence[float], *then: Callable[[Any], float]) -> CandidateT:
    """The candidate with the lowest value; ties by what the ``then`` functions read, in order, then by name."""
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
