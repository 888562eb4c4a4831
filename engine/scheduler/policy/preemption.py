"""Which requests are preempted: when blocks run out, or at random for tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from engine.contract.config import QueuePolicy, SchedulerConfig
from engine.scheduler.live_requests import LiveRequests
from engine.scheduler.requests.request import Request
from engine.scheduler.requests.request_queue import OrderKey, fcfs_key, priority_key
from engine.scheduler.requests.row_table import RowTable
from engine.scheduler.step_draft import StepDraft

OrderKeyOf = Callable[[Request], OrderKey]


def order_key(policy: QueuePolicy) -> OrderKeyOf:
    """The sort key of a queue policy: requests with smaller keys are served first and preempted last."""
    return fcfs_key if policy == "fcfs" else priority_key


class PreemptionPolicy:
    """Chooses the requests to preempt: the last ones in the order of the queue policy."""

    def __init__(self, policy: QueuePolicy) -> None:
        self.key = order_key(policy)

    def last(self, candidates: Iterable[Request]) -> Request | None:
        """The candidate that is served last."""
        return max(candidates, key=self.key, default=None)

    def victim_for(self, asker: Request, running: list[Request], ready: list[Request]) -> Request | None:
        """The request to preempt for ``asker``; None when ``asker`` has to wait.

        Only requests served after ``asker`` are preempted, with one exception: the first of all running requests may
        also take the blocks of a loaded request that does not run yet. Otherwise the two could wait for each other.
        """
        asker_key = self.key(asker)
        victim = self.last(request for request in (*running, *ready) if self.key(request) > asker_key)
        if victim is None and all(self.key(request) >= asker_key for request in running):
            victim = self.last(ready)
        return victim


class ArtificialPreemption:
    """Preempts the last running request with a probability per step, up to a number of times. Seeded: runs repeat."""

    def __init__(
        self, config: SchedulerConfig, *, table: RowTable, live_requests: LiveRequests, preemption: PreemptionPolicy
    ) -> None:
        self._probability = config.artificial_preemption_probability
        self._num_left = config.max_num_artificial_preemptions
        self._table = table
        self._live_requests = live_requests
        self._preemption = preemption
        self._random = random.Random(0)

    def prepare(self, draft: StepDraft) -> None:
        """Perhaps preempt a request, before the step is put together."""
        if not self._num_left or self._random.random() >= self._probability:
            return
        victim = self._preemption.last(self._table.running())
        if victim is not None:
            self._num_left -= 1
            self._live_requests.preempt(victim)
            draft.is_blocked = draft.has_preempted = True
