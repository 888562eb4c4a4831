"""The fewest workers that keep the promises of a load."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from router.scaling.demand import Demand
from router.scaling.prediction import Prediction, Predictor

WORTH = 0.005
"""Where no number of workers attains what is aimed at: more of them must keep so large a share of requests more."""


ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """A number of workers, what is predicted of it, and (None where it is the fewest allowed) of one fewer."""

    num_workers: int
    predicted: Prediction
    with_fewer: Prediction | None


def fewest_workers(predictor: Predictor, demand: Demand, *, target: float, least: int, most: int) -> Sizing:
    """The fewest of ``least`` to ``most`` workers with which a share ``target`` of the requests that any number could
    serve in time is; where none attains that, the fewest that attain about what ``most`` do.
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
    """The smallest number for which something holds that holds for ``most`` and, once it does, for all above."""
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
    """How many workers make up for prompts that wait already; 0 where those that are there do in time.

    ``queued_s`` are the seconds of one worker that they take, ``busy_workers`` how many the load keeps busy that comes
    meanwhile. Others are there in ``start_s``; what is left by then should be gone in as long as is promised.
    """
    if queued_s <= promise_s / 2 * num_workers:
        return 0
    left_s = queued_s - max(num_workers - busy_workers, 0.0) * start_s
    return math.ceil(busy_workers + left_s / promise_s) if left_s > 0.0 else 0


def workers_for_streams(predictor: Predictor, demand: Demand, num_streams: int) -> int:
    """How many workers the streams need that are there already."""
    return math.ceil(num_streams / predictor.most_streams(demand)) if num_streams else 0
