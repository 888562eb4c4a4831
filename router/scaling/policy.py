"""When a pool grows and shrinks: a pure function of how many workers it needs, and of how long it has been so."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

MAX_PATIENCE = 8
"""A hold becomes at most so many times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """So many workers are needed now, and so many would be with more load to spare, which is never fewer."""

    now: int
    with_margin: int


@dataclass(slots=True, kw_only=True)
class ScalingPolicy:
    """Up at once, to what is needed. Down after a hold, and no further than to what would have been enough with a
    margin at every look of that time: so a load that stays the same is answered once.

    A pool that had to grow again within a hold after it shrank holds twice as long the next time, until it shrinks
    without that: the load wavers by more than the margin.
    """

    hold_s: float
    wanted: int
    _patience: int = 1
    _needs: deque[tuple[float, int]] = field(default_factory=deque)
    _changed_s: float | None = None
    _shrank_s: float = -math.inf
    _is_regretted: bool = False

    def look(self, need: Need, now_s: float) -> int:
        """How many workers there should be from now on."""
        if self._changed_s is None:
            self._changed_s = now_s
        self._remember(max(need.now, need.with_margin), now_s)
        hold_s = self._patience * self.hold_s
        if need.now > self.wanted:
            self._is_regretted = now_s - self._shrank_s <= hold_s
            self.wanted, self._changed_s = need.now, now_s
            if self._is_regretted:
                self._patience = min(2 * self._patience, MAX_PATIENCE)
        elif now_s - self._changed_s >= hold_s and (peak := self._peak(now_s - hold_s)) < self.wanted:
            self._patience = self._patience if self._is_regretted else 1
            self._is_regretted = False
            self.wanted, self._changed_s, self._shrank_s = peak, now_s, now_s
        return self.wanted

    def _peak(self, since_s: float) -> int:
        """The most that would have been needed with a margin from then on."""
        return next(number for at_s, number in self._needs if at_s >= since_s)

    def _remember(self, number: int, now_s: float) -> None:
        """Keep the looks that are larger than all that came behind them."""
        needs = self._needs
        while needs and needs[-1][1] <= number:
            needs.pop()
        needs.append((now_s, number))
        while now_s - needs[0][0] > MAX_PATIENCE * self.hold_s:
            needs.popleft()
