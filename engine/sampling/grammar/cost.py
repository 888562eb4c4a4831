"""What following its grammar costs a row, and when that is too much for those who share its steps.

A grammar that reads its text in many ways, as ``s: "a" | s s`` does, costs more with every token. The library's limits
do not tell it from others: it is slow with as few items as a schema of 200 optional properties has. Of a processor's
time ordinary grammars take some 0.01 ms a token, so time tells. Time that a thread waits for a core does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

FREE_S_PER_TOKEN: Final = 0.002
"""Of a processor, for each token that is followed or has its mask made: a hundred times what is usual."""

MAX_OVERRUN_S: Final = 0.5
"""Beyond that, in all, less what later tokens leave of theirs: a grammar may be slow now and then."""

TOO_LONG: Final = "it takes too long, as where a text can be read in many ways"


@dataclass(slots=True)
class RowCost:
    """What a row's grammar cost beyond what each token may."""

    overrun_s: float = 0.0

    @property
    def is_suspect(self) -> bool:
        """True while it has cost more than it may."""
        return self.overrun_s > 0.0

    def charge(self, seconds: float, *, num_tokens: int) -> bool:
        """Count what so many tokens cost; False where it was too much in all."""
        self.overrun_s = max(self.overrun_s + seconds - FREE_S_PER_TOKEN * num_tokens, 0.0)
        return self.overrun_s <= MAX_OVERRUN_S


@dataclass(frozen=True, slots=True)
class CostClocks:
    """How costs are measured: ``cpu_s`` is what the calling thread took of a processor."""

    cpu_s: Callable[[], float] = time.thread_time
    wall_s: Callable[[], float] = time.perf_counter
