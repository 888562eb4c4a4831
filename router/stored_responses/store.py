"""The responses that one router keeps, within limits on their count, total size and age."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from engine.versions import across_versions
from router.fair_shelf import FairShelf

Order: TypeAlias = Literal["read", "delete", "cancel"]
"""What a router can be asked to do with a response that it keeps."""

_OVERHEAD_BYTES = 1024
"""Approximate memory of a stored response in addition to its JSON, in bytes."""


@across_versions
@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One response, as it is stored and as it is sent to other routers (``engine.versions``).

    ``owner`` is the hash of the API key that the response was requested with; empty where no key was needed.
    ``body`` is the response object as JSON. ``items`` are JSON lists, one a turn: the items of the whole conversation,
    with what the model wrote in this response at the end. ``status`` is the response object's status; it is empty if
    it comes from a router of a version that does not send it.
    """

    response_id: str
    owner: str
    body: bytes
    items: tuple[bytes, ...]
    status: str = ""

    @property
    def num_bytes(self) -> int:
        """Upper bound of its memory in bytes: items that responses share are counted for each response."""
        return _OVERHEAD_BYTES + len(self.body) + sum(map(len, self.items))


class RunningResponse(Protocol):
    """A response that is being generated."""

    @property
    def owner(self) -> str:
        """The hash of the API key that it was requested with."""

    def so_far(self) -> StoredResponse:
        """The response with what was generated so far."""

    def cancel(self, *, keeps: bool) -> None:
        """Stop generating; with ``keeps``, store what was generated so far."""


class ResponseStore:
    """Finished responses by id, oldest first, and responses that are still running.

    When a new response exceeds the limit on count or bytes, the oldest responses of the owner who has most are evicted.
    So no owner loses a response to others while it uses no more than an equal share (``router.fair_shelf``). A response
    that is larger than the whole store is not kept at all.
    """

    def __init__(
        self,
        *,
        router_id: str,
        max_count: int,
        max_bytes: int,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.keeps_any = max_count > 0
        self._router_id = router_id
        self._ttl_s = ttl_s
        self._clock = clock
        self._stored: FairShelf[str, _Kept] = FairShelf(max_count=max_count, max_size=max_bytes)
        self._running: dict[str, RunningResponse] = {}

    @property
    def num_stored(self) -> int:
        """Number of finished responses that are kept."""
        return self._stored.num_kept

    @property
    def num_bytes(self) -> int:
        """Memory that the kept responses use together."""
        return self._stored.size

    @property
    def num_running(self) -> int:
        """Number of responses that are being generated."""
        return len(self._running)

    def new_id(self) -> str:
        """An unguessable id that names this router."""
        return f"resp_{self._router_id}_{uuid.uuid4().hex}"

    def begin(self, response_id: str, running: RunningResponse) -> None:
        """Register a response that is being generated, until ``end``."""
        self._running[response_id] = running

    def end(self, response_id: str) -> None:
        """Unregister a running response. Idempotent."""
        self._running.pop(response_id, None)

    def put(self, stored: StoredResponse) -> None:
        """Keep a response."""
        self.drop_expired()
        kept = _Kept(self._clock() + self._ttl_s, stored)
        self._stored.put(stored.response_id, kept, owner=stored.owner, size=stored.num_bytes)

    def drop_expired(self) -> None:
        """Drop responses that are older than the time to live."""
        now_s = self._clock()
        while (kept := self._stored.oldest()) is not None and kept.until_s <= now_s:
            self._stored.pop(kept.response.response_id)

    def take_order(self, order: Order, response_id: str, *, owner: str) -> StoredResponse | None:
        """Read, delete or cancel a response; None if this owner has no response of this id. Cancelling a finished
        response changes nothing.
        """
        self.drop_expired()
        running = self._running.get(response_id)
        if running is not None and running.owner == owner:
            if order != "read":
                running.cancel(keeps=order == "cancel")
            return running.so_far()
        kept = self._stored.get(response_id)
        if kept is None or kept.response.owner != owner:
            return None
        if order == "delete":
            self._stored.pop(response_id)
        return kept.response


@dataclass(frozen=True, slots=True)
class _Kept:
    """A stored response and when it expires."""

    until_s: float
    response: StoredResponse
