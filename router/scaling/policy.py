"""When a pool grows and shrinks, by how many workers it needs and for how long. No I/O; the caller passes the time."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

MAX_PATIENCE = 8
"""The longest hold, as a multiple of the configured one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The workers needed now, and the workers needed with a margin of load, which are never fewer."""

    now: int
    with_margin: int


@dataclass(slots=True, kw_only=True)
class ScalingPolicy:
    """Grows at once, to what is needed. Shrinks after a hold, and only to the number that would have sufficed with a
    margin at every look during the hold. So a constant load leads to one change.

    If a pool has to grow again within a hold after it shrank, the load varies by more than the margin. Then each hold
    is twice as long as the one before, until the pool shrinks without having to grow again.
    """

    hold_s: float
    wanted: int
    _patience: int = 1
    _needs: deque[tuple[float, int]] = field(default_factory=deque)
    _changed_s: float | None = None
    _shrank_s: float = -math.inf
    _is_regretted: bool = False

    def look(self, need: Need, now_s: float) -> int:
        """The number of workers that there should be from now on."""
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
        """The most workers needed with the margin since ``since_s``."""
        return next(number for at_s, number in self._needs if at_s >= since_s)

    def _remember(self, number: int, now_s: float) -> None:
        """Add a look, and keep only looks that are larger than all later ones: a monotonic queue."""
        needs = self._needs
        while needs and needs[-1][1] <= number:
            needs.pop()
        needs.append((now_s, number))
        while now_s - needs[0][0] > MAX_PATIENCE * self.hold_s:
            needs.popleft()
