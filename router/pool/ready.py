"""The replicas that requests can be sent to now."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from router.pool.replica import Replica


class ReadyReplicas:
    """The replicas in service with fresh reports, in a list that is cached until that changes.

    Replicas whose token stream has begun are preferred. On a busy machine a new process may need seconds until its
    stream begins, and a request sent there would wait although others could serve it.
    """

    def __init__(self, replicas: Mapping[str, Replica], *, stale_after_s: float, clock: Callable[[], float]) -> None:
        self._replicas = replicas
        self._stale_after_s = stale_after_s
        self._clock = clock
        self._ready: list[Replica] = []
        self._until_s = -math.inf

    def now(self) -> list[Replica]:
        """The fresh replicas with a stream; all fresh ones if none has a stream."""
        now_s = self._clock()
        if now_s > self._until_s:
            limit_s = now_s - self._stale_after_s
            fresh = [item for item in self._replicas.values() if item.reported_at_s >= limit_s and item.takes_requests]
            self._until_s = min([item.reported_at_s for item in fresh], default=-math.inf) + self._stale_after_s
            self._ready = [item for item in fresh if item.has_stream] or fresh
        return self._ready

    def forget(self) -> None:
        """Drop the cached list: some replica came or went, or began or ceased to take requests."""
        self._until_s = -math.inf
