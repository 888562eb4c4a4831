"""Finds the cheapest layout that keeps the promise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simulation.layout import Layout
from simulation.whatif.answer import Judge, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Cheapest:
    """All verdicts in the order in which they were made, and the cheapest that kept the promise; None: none did."""

    tried: Sequence[Verdict]
    best: Verdict | None


def search_cheapest(
    judge: Judge, candidates: Callable[[int], Sequence[Layout]], *, attainment: float, max_workers: int
) -> Cheapest:
    """The layout with the fewest workers of which at least a share of ``attainment`` of the requests keeps the promise;
    of several the one that costs least, then the one with the higher attainment.

    Doubles the number of workers until some layout keeps it, and halves what is between: takes more workers never to be
    worse. All layouts of a size are judged together.
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
