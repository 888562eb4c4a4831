"""The times at which a request passed from one phase to the next."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Milestones:
    """Times by ``time.perf_counter``, set as they happen; None for what has not happened.

    ``engine_queue_s`` is how long the first engine let the request wait, by its own clock.
    """

    accepted_s: float = field(default_factory=time.perf_counter)
    admitted_s: float | None = None
    handed_over_s: float | None = None
    tokens_s: list[float] = field(default_factory=list)
    engine_queue_s: float = 0.0

    def enter(self, stage: str) -> None:
        """Note that the request leaves admission, or that a prefill replica has finished with it."""
        now_s = time.perf_counter()
        if self.admitted_s is None:
            self.admitted_s = now_s
        if stage == "decode" and self.tokens_s:
            self.handed_over_s = now_s

    @property
    def wants_tokens(self) -> bool:
        """True until the times of the first two tokens are known; later ones are not recorded."""
        return len(self.tokens_s) < 2

    def token(self, queue_s: float | None) -> None:
        """Note that tokens came. Only the first two times are recorded."""
        if len(self.tokens_s) < 2:
            self.tokens_s.append(time.perf_counter())
            if len(self.tokens_s) == 1 and queue_s is not None:
                self.engine_queue_s = queue_s

    @property
    def first_token_s(self) -> float:
        """Time of the first token; before it, the time of acceptance."""
        return self.tokens_s[0] if self.tokens_s else self.accepted_s

    @property
    def queue_s(self) -> float:
        """Seconds that the request waited: at the router for room, and at the engine to be computed."""
        admitted_s = self.first_token_s if self.admitted_s is None else self.admitted_s
        return admitted_s - self.accepted_s + self.engine_queue_s

    @property
    def prefill_s(self) -> float:
        """Seconds from the end of these waits to the first token."""
        return max(self.first_token_s - self.accepted_s - self.queue_s, 0.0)

    @property
    def handover_s(self) -> float | None:
        """Seconds from the prefill replica's token to the first one of a decode replica."""
        if self.handed_over_s is None or len(self.tokens_s) < 2:
            return None
        return self.tokens_s[1] - self.tokens_s[0]
