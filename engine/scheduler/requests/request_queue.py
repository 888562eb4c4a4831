"""Queues of requests in the order in which they are served: ``fcfs`` and ``priority``. Free of torch."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, count
from typing import Final, Protocol, TypeAlias

from engine.contract.config import QueuePolicy
from engine.scheduler.requests.request import Request

OrderKey: TypeAlias = tuple[float, float, int]

MAX_PASSING: Final = 32
"""This many requests that bring their KV along may pass the first prompt; then it is served before the next of them."""

MAX_DEFERRED_PASSED: Final = 16
"""This many requests may pass the first deferred one, whose promise cannot be kept any more; then it is served."""


def fcfs_key(request: Request) -> OrderKey:
    """First come, first served: by arrival on this engine."""
    return (0, 0.0, request.arrival_index)


def priority_key(request: Request) -> OrderKey:
    """Lower ``priority`` values first, then by the router's arrival time, then by arrival on this engine."""
    return (request.message.priority, request.message.arrival_s, request.arrival_index)


class RequestQueue(Protocol):
    """A queue with cheap prepend, peek and removal from the middle."""

    def __len__(self) -> int:
        """How many requests wait."""

    def __iter__(self) -> Iterator[Request]:
        """All waiting requests, in no particular order."""

    def __contains__(self, request: object) -> bool:
        """True when this very request is queued."""

    def push(self, request: Request) -> None:
        """Add a newly arrived request."""

    def push_front(self, request: Request) -> None:
        """Put back a request that was at the head."""

    def peek(self) -> Request | None:
        """The next request, None when empty."""

    def pop(self) -> Request:
        """Take the next request."""

    def remove(self, request: Request) -> None:
        """Take a request from wherever it is."""


class FcfsQueue:
    """First come, first served, except that requests whose prompt was computed elsewhere go before prompts.

    A request that brings its KV along had its turn elsewhere, and its next tokens are expected soon; it needs a row and
    no computing of its prompt. ``MAX_PASSING`` of them pass the first prompt. The next ones wait for this one prompt,
    and pass the prompt after it. So prompts never starve, and no request waits for all prompts. Preempted requests
    pass all.
    """

    def __init__(self) -> None:
        self._started: OrderedDict[str, Request] = OrderedDict()
        self._prompts: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._started) + len(self._prompts)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._started.values(), self._prompts.values())

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and self._lane_with(request).get(request.request_id) is request

    def push(self, request: Request) -> None:
        """Add a newly arrived request."""
        self._lane_for(request)[request.request_id] = request

    def push_front(self, request: Request) -> None:
        """Put back a request that was at the head."""
        lane = self._lane_for(request)
        lane[request.request_id] = request
        lane.move_to_end(request.request_id, last=False)
        if lane is self._started:
            self._count_passing(request, -1)

    def peek(self) -> Request | None:
        """The next request, None when empty."""
        started, prompt = next(iter(self._started.values()), None), next(iter(self._prompts.values()), None)
        if started is None or prompt is None:
            return started or prompt
        return prompt if prompt.num_passed_by >= MAX_PASSING and not started.num_preemptions else started

    def pop(self) -> Request:
        """Take the next request."""
        request = self.peek()
        assert request is not None, "pop from an empty queue"
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        """Take a request from wherever it is."""
        lane = self._lane_with(request)
        del lane[request.request_id]
        if lane is self._started:
            self._count_passing(request, 1)

    def _count_passing(self, request: Request, change: int) -> None:
        prompt = next(iter(self._prompts.values()), None)
        if prompt is not None and not request.num_preemptions:
            prompt.num_passed_by = max(prompt.num_passed_by + change, 0)

    def _lane_for(self, request: Request) -> OrderedDict[str, Request]:
        return self._started if request.kv_transfer is not None or request.num_preemptions else self._prompts

    def _lane_with(self, request: Request) -> OrderedDict[str, Request]:
        """The lane in which a request was put; it may have lost what it brought along since then."""
        return self._started if request.request_id in self._started else self._prompts


class PriorityQueue:
    """Smallest ``priority_key`` first. The heap entry of a removed request stays until it reaches the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[OrderKey, int, Request]] = []
        self._entries = count()
        self._queued: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._queued)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queued.values())

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and self._queued.get(request.request_id) is request

    def push(self, request: Request) -> None:
        """Add a request; its key decides its place."""
        self._queued[request.request_id] = request
        heapq.heappush(self._heap, (priority_key(request), next(self._entries), request))

    def push_front(self, request: Request) -> None:
        """Put back a request; its key decides its place."""
        self.push(request)

    def peek(self) -> Request | None:
        """The next request, None when empty."""
        heap = self._heap
        while heap and self._queued.get(heap[0][2].request_id) is not heap[0][2]:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def pop(self) -> Request:
        """Take the next request."""
        request = self.peek()
        assert request is not None, "pop from an empty queue"
        heapq.heappop(self._heap)
        del self._queued[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        """Take a request from wherever it is."""
        del self._queued[request.request_id]
        if len(self._heap) > 64 + 2 * len(self._queued):
            self._heap = [(priority_key(queued), next(self._entries), queued) for queued in self._queued.values()]
            heapq.heapify(self._heap)


class DeferringQueue:
    """A queue in which requests whose promise can be kept pass deferred ones, whose promise cannot, of the same
    priority.

    Deferred requests keep their order. ``MAX_DEFERRED_PASSED`` others may pass the first of them, then it is served, so
    that they never starve. A preempted request is no longer deferred: it was served already.
    """

    def __init__(self, policy: QueuePolicy) -> None:
        self._in_time, self._deferred = make_queue(policy), make_queue(policy)
        self._has_priorities = policy == "priority"
        self.num_deferred_tokens = 0
        """Prompt tokens of the deferred requests."""

    def __len__(self) -> int:
        return len(self._in_time) + len(self._deferred)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._in_time, self._deferred)

    def __contains__(self, request: object) -> bool:
        return request in self._in_time or request in self._deferred

    def push(self, request: Request) -> None:
        """Add a newly arrived request."""
        lane = self._lane_for(request)
        lane.push(request)
        if lane is self._deferred:
            self.num_deferred_tokens += request.num_tokens

    def push_front(self, request: Request) -> None:
        """Put back a request that was at the head."""
        lane = self._lane_for(request)
        lane.push_front(request)
        if lane is self._deferred:
            self.num_deferred_tokens += request.num_tokens
        else:
            self._count_passing(-1)

    def peek(self) -> Request | None:
        """The next request, None when empty."""
        first = self._in_time.peek()
        if not len(self._deferred):
            return first
        deferred = self._deferred.peek()
        return first if deferred is None or (first is not None and self._passes(first, deferred)) else deferred

    def peek_in_time(self) -> Request | None:
        """The first request that is not deferred."""
        return self._in_time.peek()

    def pop(self) -> Request:
        """Take the next request."""
        request = self.peek()
        assert request is not None, "pop from an empty queue"
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        """Take a request from wherever it is."""
        if request in self._deferred:
            self._deferred.remove(request)
            self.num_deferred_tokens -= request.num_tokens
            return
        self._in_time.remove(request)
        self._count_passing(1)

    def defer(self, request: Request) -> None:
        """Defer a waiting request, so that others pass it."""
        self._in_time.remove(request)
        request.is_deferred, request.num_passed_by = True, 0
        self._deferred.push(request)
        self.num_deferred_tokens += request.num_tokens

    def _passes(self, first: Request, deferred: Request) -> bool:
        if self._has_priorities and first.message.priority != deferred.message.priority:
            return first.message.priority < deferred.message.priority
        return deferred.num_passed_by < MAX_DEFERRED_PASSED

    def _count_passing(self, change: int) -> None:
        if len(self._deferred) and (deferred := self._deferred.peek()) is not None:
            deferred.num_passed_by = max(deferred.num_passed_by + change, 0)

    def _lane_for(self, request: Request) -> RequestQueue:
        return self._deferred if request.is_deferred and not request.num_preemptions else self._in_time


def make_queue(policy: QueuePolicy) -> RequestQueue:
    """An empty queue for a policy."""
    return FcfsQueue() if policy == "fcfs" else PriorityQueue()
