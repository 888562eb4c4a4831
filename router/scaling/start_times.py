"""How long workers take to start, by those that were seen to."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

NEW_WEIGHT = 0.5
"""Of the last start in the average."""

LONGEST_S = 3600.0


class StartTimes:
    """Takes the workers that come after more were ordered to be those. One pool's."""

    def __init__(self, expected_s: float) -> None:
        self.expected_s = expected_s
        self._is_measured = False
        self._known: frozenset[str] | None = None
        self._ordered_s: deque[float] = deque()

    def order(self, number: int, now_s: float) -> None:
        """So many more are to start from now on; fewer than 0: so many fewer."""
        if number > 0:
            self._ordered_s.extend([now_s] * number)
        for _ in range(min(-number, len(self._ordered_s))):
            self._ordered_s.pop()

    def see(self, replica_ids: Collection[str], now_s: float) -> None:
        """These take requests now."""
        known, self._known = self._known, frozenset(replica_ids)
        if known is None:
            return
        for _ in self._known - known:
            if self._ordered_s:
                self._take(min(now_s - self._ordered_s.popleft(), LONGEST_S))

    def _take(self, seconds: float) -> None:
        weight = NEW_WEIGHT if self._is_measured else 1.0
        self.expected_s += weight * (seconds - self.expected_s)
        self._is_measured = True
