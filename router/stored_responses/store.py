"""The responses that one router keeps: so many, so large together, and for so long."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from engine.versions import across_versions
from router.fair_shelf import FairShelf

Order: TypeAlias = Literal["read", "delete", "cancel"]
"""What can be asked of the router that has a response."""

_OVERHEAD_BYTES = 1024
"""What a stored response takes beside its JSON, roughly."""


@across_versions
@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One response as it is kept, and told to other routers (``engine.versions``).

    ``owner`` is the hash of the key that it was made with; empty where no key was needed.
    ``body`` is the response object as JSON. ``items`` are JSON lists: the items of the whole conversation, turn by
    turn, those that the model wrote in this response at the end. ``status`` is that of the response object; empty from
    a router of a version that does not tell it.
    """

    response_id: str
    owner: str
    body: bytes
    items: tuple[bytes, ...]
    status: str = ""

    @property
    def num_bytes(self) -> int:
        """The memory it takes at most: what conversations share is counted for each response."""
        return _OVERHEAD_BYTES + len(self.body) + sum(map(len, self.items))


class RunningResponse(Protocol):
    """A response that is being generated."""

    @property
    def owner(self) -> str:
        """The hash of the key that it was asked for with."""

    def so_far(self) -> StoredResponse:
        """What it is now."""

    def cancel(self, *, keeps: bool) -> None:
        """End it; what came so far is stored if ``keeps``."""


class ResponseStore:
    """Finished responses by id, oldest first, and those that run.

    A new one pushes out the oldest ones of the owner who has most, where there would be too many, or too many bytes: no
    owner loses a response to others while it has no more than an equal part (``router.fair_shelf``). One that is larger
    than all the room is not kept at all.
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
        self._router_id = router_id
        self._ttl_s = ttl_s
        self._clock = clock
        self._stored: FairShelf[str, _Kept] = FairShelf(max_count=max_count, max_size=max_bytes)
        self._running: dict[str, RunningResponse] = {}

    @property
    def num_stored(self) -> int:
        """How many are kept."""
        return self._stored.num_kept

    @property
    def num_bytes(self) -> int:
        """What they take together."""
        return self._stored.size

    @property
    def num_running(self) -> int:
        """How many are being generated."""
        return len(self._running)

    def new_id(self) -> str:
        """An id that nobody can guess, and that names this router."""
        return f"resp_{self._router_id}_{uuid.uuid4().hex}"

    def begin(self, response_id: str, running: RunningResponse) -> None:
        """Know a response that is being generated, until ``end``."""
        self._running[response_id] = running

    def end(self, response_id: str) -> None:
        """Forget that it runs. Idempotent."""
        self._running.pop(response_id, None)

    def put(self, stored: StoredResponse) -> None:
        """Keep a response."""
        self.drop_expired()
        kept = _Kept(self._clock() + self._ttl_s, stored)
        self._stored.put(stored.response_id, kept, owner=stored.owner, size=stored.num_bytes)

    def drop_expired(self) -> None:
        """Forget what is older than the time to live."""
        now_s = self._clock()
        while (kept := self._stored.oldest()) is not None and kept.until_s <= now_s:
            self._stored.pop(kept.response.response_id)

    def take_order(self, order: Order, response_id: str, *, owner: str) -> StoredResponse | None:
        """Read, delete or cancel a response; None where its owner has none of this id. What is finished stays as it is
        when it is cancelled.
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
    """A response until it expires."""

    until_s: float
    response: StoredResponse
