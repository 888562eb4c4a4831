"""Which replicas requests can be sent to now."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from router.pool.replica import Replica


class ReadyReplicas:
    """The replicas in service whose reports are fresh, in a list that stays the same until that changes.

    Those whose stream of tokens has begun come first: a process that has just started on a busy machine may need
    seconds until its stream begins, and a request that is sent there waits for it, while others could serve it.
    """

    def __init__(self, replicas: Mapping[str, Replica], *, stale_after_s: float, clock: Callable[[], float]) -> None:
        self._replicas = replicas
        self._stale_after_s = stale_after_s
        self._clock = clock
        self._ready: list[Replica] = []
        self._until_s = -math.inf

    def now(self) -> list[Replica]:
        """Those with a stream; all fresh ones where none has one."""
        now_s = self._clock()
        if now_s > self._until_s:
            limit_s = now_s - self._stale_after_s
            fresh = [item for item in self._replicas.values() if item.reported_at_s >= limit_s and item.takes_requests]
            self._until_s = min([item.reported_at_s for item in fresh], default=-math.inf) + self._stale_after_s
            self._ready = [item for item in fresh if item.has_stream] or fresh
        return self._ready

    def forget(self) -> None:
        """Some replica came, went, began or ceased to take requests."""
        self._until_s = -math.inf
