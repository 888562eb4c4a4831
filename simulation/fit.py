"""Fits a model of step times to measured steps. A price is the time of one unit of work."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.contract.step_time import StepTimeModel, StepWork

NUM_PASSES = 3
TOLERANCE = 1.5
"""Steps whose error is more than this many times the usual one get less weight: something else delayed them."""

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """The work of a step, and its time."""

    work: StepWork
    seconds: float


def fit_step_time(samples: Sequence[StepSample]) -> StepTimeModel:
    """The non-negative prices that fit the step times best, by relative error."""
    if not samples:
        raise ValueError("no steps were measured, so that no prices can be fitted")
    work = np.array([_terms(sample.work) for sample in samples])
    seconds = np.array([sample.seconds for sample in samples])
    trust = np.ones_like(seconds)
    for _ in range(NUM_PASSES):
        prices = _nonnegative(work * (trust / seconds)[:, None], trust)
        off = np.abs(work @ prices / seconds - 1.0)
        usual = max(float(np.median(off)), 1e-6)
        trust = np.sqrt(np.minimum(1.0, TOLERANCE * usual / np.maximum(off, 1e-9)))
    return StepTimeModel(
        base_s=float(prices[0]),
        row_s=float(prices[1]),
        context_token_s=float(prices[2]),
        prompt_token_s=float(prices[3]),
        prompt_read_s=float(prices[4]),
        error=float(off.mean()),
        num_steps=len(samples),
    )


def log_spread(samples: Sequence[StepSample], model: StepTimeModel) -> float:
    """The noise of steps: standard deviation of the logarithm of measured time divided by predicted time."""
    logs = [math.log(sample.seconds / model.seconds(sample.work)) for sample in samples]
    return statistics.pstdev(logs) if len(logs) > 1 else 0.0


def _terms(work: StepWork) -> tuple[float, ...]:
    return (1.0, work.num_rows, work.num_context_tokens, work.num_prompt_tokens, work.num_prompt_reads)


def _nonnegative(terms: FloatArray, goal: FloatArray) -> FloatArray:
    """The non-negative least-squares solution: the best one over all subsets of prices, with the others at 0."""
    scale = np.maximum(np.abs(terms).max(axis=0), 1e-300)
    scaled = terms / scale
    best, best_loss = np.zeros(terms.shape[1]), math.inf
    for subset in range(1, 1 << terms.shape[1]):
        columns = [index for index in range(terms.shape[1]) if subset >> index & 1]
        found = np.linalg.lstsq(scaled[:, columns], goal, rcond=None)[0]
        loss = float(((scaled[:, columns] @ found - goal) ** 2).sum())
        if found.min() >= 0.0 and loss < best_loss:
            best, best_loss = np.zeros(terms.shape[1]), loss
            best[columns] = found
    prices: FloatArray = best / scale
    return prices
