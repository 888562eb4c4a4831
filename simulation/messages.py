"""When the tokens of steps reach their clients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulation.machine import RouterModel


class Messages:
    """The way of tokens from their steps to the clients. Those of a stream arrive in their order."""

    def __init__(self, model: RouterModel, *, seed: int) -> None:
        self._model = model
        self._source = np.random.default_rng(seed)

    def arrive(self, ends_s: Sequence[float], *, after_s: float) -> Sequence[float]:
        """When the tokens of one stream's next steps arrive, which end at ``ends_s``; ``after_s``: when its last one
        did.
        """
        direct_s = [end_s + self._model.message_s for end_s in ends_s]
        if not self._model.message_wait_s:
            return direct_s
        waits_s = self._source.exponential(self._model.message_wait_s, len(direct_s))
        times_s: list[float] = np.maximum(np.maximum.accumulate(direct_s + waits_s), after_s).tolist()
        return times_s
