"""Requests in the order in which they are served: ``fcfs`` and ``priority``. Free of torch."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from itertools import count
from typing import Protocol, TypeAlias

from engine.contract.config import QueuePolicy
from engine.scheduler.requests.request import Request

OrderKey: TypeAlias = tuple[float, float, int]


def fcfs_key(request: Request) -> OrderKey:
    """First come, first served: by arrival on this engine."""
    return (0, 0.0, request.arrival_index)


def priority_key(request: Request) -> OrderKey:
    """Lower ``priority`` values first, then the router's arrival time, then arrival on this engine."""
    return (request.message.priority, request.message.arrival_s, request.arrival_index)


class RequestQueue(Protocol):
    """A queue with cheap prepend, peek and removal from the middle."""

    def __len__(self) -> int:
        """How many wait."""

    def __iter__(self) -> Iterator[Request]:
        """All of them, in no particular order."""

    def __contains__(self, request: object) -> bool:
        """True when this very request is queued."""

    def push(self, request: Request) -> None:
        """Add a request that came last."""

    def push_front(self, request: Request) -> None:
        """Put back a request that was at the head."""

    def peek(self) -> Request | None:
        """The next request, None when empty."""

    def pop(self) -> Request:
        """Take the next request."""

    def remove(self, request: Request) -> None:
        """Take a request from wherever it is."""


class FcfsQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and self._requests.get(request.request_id) is request

    def push(self, request: Request) -> None:
        """Add a request that came last."""
        self._requests[request.request_id] = request

    def push_front(self, request: Request) -> None:
        """Put back a request that was at the head."""
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request | None:
        """The next request, None when empty."""
        return next(iter(self._requests.values()), None)

    def pop(self) -> Request:
        """Take the next request."""
        return self._requests.popitem(last=False)[1]

    def remove(self, request: Request) -> None:
        """Take a request from wherever it is."""
        del self._requests[request.request_id]


class PriorityQueue:
    """Smallest ``priority_key`` first. Removed requests leave their heap entry behind until it surfaces."""

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
        """Add a request; where it goes follows from its key."""
        self._queued[request.request_id] = request
        heapq.heappush(self._heap, (priority_key(request), next(self._entries), request))

    def push_front(self, request: Request) -> None:
        """Put back a request; where it goes follows from its key."""
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


def make_queue(policy: QueuePolicy) -> RequestQueue:
    """An empty queue for a policy."""
    return FcfsQueue() if policy == "fcfs" else PriorityQueue()
