"""Finds the cheapest layout that keeps the promise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simulation.layout import Layout
from simulation.whatif.answer import Judge, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Cheapest:
    """All verdicts in the order in which they were made, and the cheapest one that kept the promise, if any did."""

    tried: Sequence[Verdict]
    best: Verdict | None


def search_cheapest(
    judge: Judge, candidates: Callable[[int], Sequence[Layout]], *, attainment: float, max_workers: int
) -> Cheapest:
    """The layout with the fewest workers for which a share of at least ``attainment`` of the requests keeps the
    promise. Of several the cheapest one, then the one with the higher attainment.

    The number of workers is doubled until some layout keeps the promise, then bisected, assuming that more workers are
    never worse. All layouts of a size are judged together.
    """
    tried: list[Verdict] = []

    def best_of(num_workers: int) -> Verdict | None:
        verdicts = judge(candidates(num_workers))
        tried.extend(verdicts)
        keeping = [verdict for verdict in verdicts if verdict.attainment >= attainment]
        return min(keeping, key=lambda verdict: (verdict.cost, -verdict.attainment), default=None)

    too_few, num_workers = 0, 1
    best = best_of(num_workers)
    while best is None and num_workers < max_workers:
        too_few, num_workers = num_workers, min(2 * num_workers, max_workers)
        best = best_of(num_workers)
    while best is not None and num_workers - too_few > 1:
        middle = (too_few + num_workers) // 2
        found = best_of(middle)
        if found is None:
            too_few = middle
        else:
            best, num_workers = found, middle
    return Cheapest(tried=tried, best=best)
