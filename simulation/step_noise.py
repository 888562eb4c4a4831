"""How much longer or shorter than predicted steps are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NUM_DRAWN = 256
"""Factors are drawn so many at a time."""

FloatArray = npt.NDArray[np.float64]


class StepNoise:
    """Factors on the times of steps, whose logarithms have the standard deviation ``spread``, and whose mean is 1.

    Each step that was made uses one, in their order, however many were looked at before.
    """

    def __init__(self, spread: float, *, seed: int) -> None:
        self._spread = spread
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
            factors = np.exp(self._spread * drawn - self._spread * self._spread / 2)
            self._waiting, self._at = np.concatenate((self._waiting[self._at :], factors)), 0
        return self._waiting[self._at : self._at + num_steps]

    def use(self, num_steps: int) -> None:
        """So many steps were made."""
        if self._spread:
            self._at += num_steps
