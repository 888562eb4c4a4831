"""Finds the fewest workers that keep the promises of a load."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from router.scaling.demand import Demand
from router.scaling.prediction import Prediction, Predictor

WORTH = 0.005
"""If no number of workers reaches the target, more workers must still add this share of requests to be worth it."""


ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """A number of workers, its prediction, and that of one fewer (None if the number is the least allowed)."""

    num_workers: int
    predicted: Prediction
    with_fewer: Prediction | None


def fewest_workers(predictor: Predictor, demand: Demand, *, target: float, least: int, most: int) -> Sizing:
    """The fewest workers, from ``least`` to ``most``, that keep the promise of a share ``target`` of the requests that
    can be served in time at all. If no number does, the fewest that attain nearly as much as ``most``.
    """
    known: dict[int, Prediction] = {}
    seconds = predictor.prompt_seconds(demand)

    def predict(num_workers: int) -> Prediction:
        if num_workers not in known:
            known[num_workers] = predictor.predict(demand, num_workers, seconds=seconds)
        return known[num_workers]

    at_most = predict(most)
    goal = target * at_most.possible
    if at_most.attainment < goal:
        goal = max(at_most.attainment - WORTH, ROUNDING) if at_most.attainment else math.inf
    found = _first(lambda number: predict(number).attainment >= goal, least, most)
    return Sizing(num_workers=found, predicted=predict(found), with_fewer=predict(found - 1) if found > least else None)


def _first(holds: Callable[[int], bool], least: int, most: int) -> int:
    """Binary search for the smallest number that ``holds``; it must hold for ``most``, and be monotonic."""
    too_few, enough = least - 1, most
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if holds(middle):
            enough = middle
        else:
            too_few = middle
    return enough


def workers_to_catch_up(
    *, queued_s: float, num_workers: int, busy_workers: float, promise_s: float, start_s: float
) -> int:
    """How many workers it takes to work off prompts that wait already; 0 if the present ones do so in time.

    ``queued_s`` is the work that waits, in seconds of one worker; ``busy_workers`` is how many the load that arrives
    meanwhile keeps busy. New workers start in ``start_s``; what is left then should be done within ``promise_s``.
    """
    if queued_s <= promise_s / 2 * num_workers:
        return 0
    left_s = queued_s - max(num_workers - busy_workers, 0.0) * start_s
    return math.ceil(busy_workers + left_s / promise_s) if left_s > 0.0 else 0


def workers_for_streams(predictor: Predictor, demand: Demand, num_streams: int) -> int:
    """How many workers the current streams need."""
    return math.ceil(num_streams / predictor.most_streams(demand)) if num_streams else 0
