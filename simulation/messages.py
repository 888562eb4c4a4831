"""When the tokens of steps reach their clients."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from simulation.machine import RouterModel


class Messages:
    """The way of one stream's tokens from their steps to its client, in their order.

    What they wait depends on the name of the stream and its tokens before, not on other streams: so it is the same
    however many steps are simulated at once.
    """

    def __init__(self, model: RouterModel, *, name: str, seed: int) -> None:
        self._model = model
        self._source = np.random.default_rng((seed, zlib.crc32(name.encode()))) if model.message_wait_s else None
        self._last_s = 0.0

    def arrive(self, ends_s: Sequence[float]) -> Sequence[float]:
        """When the tokens arrive of the next steps, which end at these times."""
        direct_s = [end_s + self._model.message_s for end_s in ends_s]
        if self._source is None or not direct_s:
            return direct_s
        waits_s = self._source.exponential(self._model.message_wait_s, len(direct_s))
        times_s: list[float] = np.maximum(np.maximum.accumulate(direct_s + waits_s), self._last_s).tolist()
        self._last_s = times_s[-1]
        return times_s
