"""How long a connector's thread sleeps between two polls of a transport that does not wake it."""

from __future__ import annotations

from typing import Final

FIRST_PERIOD_S: Final = 0.0002
LAST_PERIOD_S: Final = 0.001
LISTEN_PERIOD_S: Final = 0.005
QUIET_PERIOD_S: Final = 0.02
RESTING_PERIOD_S: Final = 0.1
_GROWTH: Final = 1.1


class PollPeriod:
    """The polling period: short after an event, and longer with every poll that finds nothing.

    While a load or a lease is outstanding it grows from 0.2 to 1 ms (5 % of a core). Otherwise it grows from 20 to
    100 ms (0.3 %), to answer late readers.
    """

    def __init__(self) -> None:
        self._busy_s = FIRST_PERIOD_S
        self._quiet_s = QUIET_PERIOD_S

    def restart(self) -> None:
        """Return to the short period, because something happened."""
        self._busy_s, self._quiet_s = FIRST_PERIOD_S, QUIET_PERIOD_S

    def next_busy_s(self) -> float:
        """The next sleep while something is outstanding."""
        self._quiet_s = QUIET_PERIOD_S
        self._busy_s = min(_GROWTH * self._busy_s, LAST_PERIOD_S)
        return self._busy_s

    def next_quiet_s(self) -> float:
        """The next sleep while nothing is."""
        self._quiet_s = min(_GROWTH * self._quiet_s, RESTING_PERIOD_S)
        return self._quiet_s
