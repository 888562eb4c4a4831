"""How much longer or shorter than predicted steps are."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

NUM_DRAWN = 256
"""Factors are drawn so many at a time."""

FloatArray = npt.NDArray[np.float64]


class StepNoise:
    """Factors on the times of steps, with mean 1. Their logarithms are normal ones with the standard deviation
    ``spread``, of which those above 0 are ``skew`` times as large, and those below so many times smaller.

    Each step that was made uses one, in their order, however many were looked at before.
    """

    def __init__(self, spread: float, *, skew: float = 1.0, seed: int) -> None:
        self._spread = spread
        self._above, self._below = spread * skew, spread / skew
        self._mean = _half_mean(self._above) + _half_mean(-self._below)
        self._source = np.random.default_rng(seed)
        self._waiting: FloatArray = np.empty(0)
        self._at = 0

    def next(self, num_steps: int) -> FloatArray:
        """Those of the next steps, if so many are made."""
        if not self._spread:
            return np.ones(num_steps)
        num_lacking = self._at + num_steps - self._waiting.size
        if num_lacking > 0:
            drawn = self._source.standard_normal(max(num_lacking, NUM_DRAWN))
            factors = np.exp(np.where(drawn > 0.0, self._above, self._below) * drawn) / self._mean
            self._waiting, self._at = np.concatenate((self._waiting[self._at :], factors)), 0
        return self._waiting[self._at : self._at + num_steps]

    def use(self, num_steps: int) -> None:
        """So many steps were made."""
        if self._spread:
            self._at += num_steps


def _half_mean(spread: float) -> float:
    """What the mean of exp(spread * z) owes to the z above 0 of a normal one."""
    return math.exp(spread * spread / 2) * (1.0 + math.erf(spread / math.sqrt(2))) / 2
