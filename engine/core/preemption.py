"""Who gives up its blocks when they run out (C6). Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.config import QueuePolicy
from engine.core.request import Request
from engine.core.request_queue import OrderKey, fcfs_key, priority_key

OrderKeyOf = Callable[[Request], OrderKey]


def order_key(policy: QueuePolicy) -> OrderKeyOf:
    """How a policy orders requests: smaller keys are served first and preempted last."""
    return fcfs_key if policy == "fcfs" else priority_key


class PreemptionPolicy:
    """Chooses victims: the last in the order of the queue policy."""

    def __init__(self, policy: QueuePolicy) -> None:
        self.key = order_key(policy)

    def last(self, candidates: Iterable[Request]) -> Request | None:
        """The request that is served last."""
        return max(candidates, key=self.key, default=None)

    def victim_for(self, asker: Request, running: list[Request], ready: list[Request]) -> Request | None:
        """Who must make room for ``asker``; None when it has to wait.

        Only requests that are served after ``asker`` are preempted, except that the first of all running requests may
        also take the blocks of one that is loaded but does not run yet: otherwise the two could wait for each other.
        """
        asker_key = self.key(asker)
        victim = self.last(request for request in (*running, *ready) if self.key(request) > asker_key)
        if victim is None and all(self.key(request) >= asker_key for request in running):
            victim = self.last(ready)
        return victim
