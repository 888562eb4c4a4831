"""One sampling task for all watchers, and the events that each watcher reads."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from router.errors import TooManyWatchersError
from router.live.happenings import happenings
from router.live.merge_patch import merge_patch
from router.live.sampler import Sampler, State
from router.live.timeline import Happening, Timeline

logger = logging.getLogger(f"baton.{__name__}")

PERIOD_S = 1.0
"""Sampling period while someone watches."""

UNWATCHED_PERIOD_S = 5.0
"""Sampling period while nobody watches, for the timeline."""

MAX_WATCHERS = 64
"""Maximum number of watchers of one router; further ones are refused."""


@dataclass(slots=True)
class _Reader:
    """How far one watcher has read."""

    state_number: int = 0
    entry_number: int = 0


class LiveFeed:
    """The numbered state of the cluster, the last change, and the timeline.

    A watcher is only two numbers. If it has read the previous state, it gets the change; if it is further behind,
    because it reads slowly, it gets the whole state again. So nothing is queued for watchers.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        period_s: float = PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.timeline = Timeline()
        self._sampler = sampler
        self._period_s = period_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._looked_at_s = -math.inf
        self._state: State | None = None
        self._number = 0
        self._delta = b""
        self._changed = asyncio.Event()
        self._num_watchers = 0
        self._sampling: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def num_watchers(self) -> int:
        """Number of watchers now."""
        return self._num_watchers

    @property
    def is_sampling(self) -> bool:
        """True while someone watches."""
        return self._sampling is not None

    def tell(self, happening: Happening) -> None:
        """Add an event that no state shows, such as why something was decided. Watchers get it with the next change."""
        self.timeline.add(happening, at_unix_s=self._wall_clock())

    def look_if_due(self) -> None:
        """Keep the timeline going while nobody watches: samples once every ``UNWATCHED_PERIOD_S`` at most."""
        if self._sampling is None and self._clock() - self._looked_at_s >= UNWATCHED_PERIOD_S:
            self.look()

    def look(self) -> None:
        """Sample once, note what happened, and wake the watchers."""
        self._looked_at_s = self._clock()
        before, state = self._state, self._sampler.sample()
        self._state = state
        self._number += 1
        if before is not None:
            for happening in happenings(before, state):
                self.timeline.add(happening, at_unix_s=state["at_unix_s"])
        if self._num_watchers:
            change = {} if before is None else merge_patch(before, state)
            self._delta = _event("delta", json.dumps({"number": self._number, "patch": change}, separators=(",", ":")))
            self._wake()

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, first the whole state, until the feed is closed. Close the iterator to stop watching.

        Raises:
            TooManyWatchersError: The limit of watchers is reached.
        """
        self.check_room()
        self._begin()
        reader = _Reader()
        try:
            while not self._is_closed:
                changed = self._changed
                if news := self._news(reader):
                    yield news
                else:
                    await changed.wait()
        finally:
            self._end()

    def check_room(self) -> None:
        """Refuse another watcher if there are too many.

        Raises:
            TooManyWatchersError: The limit of watchers is reached.
        """
        if self._num_watchers >= MAX_WATCHERS:
            raise TooManyWatchersError(max_watchers=MAX_WATCHERS)

    def close(self) -> None:
        """End all streams, and accept no new ones. Idempotent."""
        self._is_closed = True
        self._wake()
        if self._sampling is not None:
            self._sampling.cancel()
            self._sampling = None

    def _news(self, reader: _Reader) -> bytes:
        """The events that a watcher has not read yet; empty if there are none."""
        if reader.state_number == self._number:
            return b""
        is_next = reader.state_number and reader.state_number == self._number - 1
        parts = [self._delta if is_next else self._snapshot()]
        if is_next:
            parts += [_event("event", text) for text in self.timeline.since(reader.entry_number)]
        reader.state_number, reader.entry_number = self._number, self.timeline.last_number
        return b"".join(parts)

    def _snapshot(self) -> bytes:
        assert self._state is not None, "a watcher's beginning samples"
        entries = ",".join(self.timeline.since(0))
        state = json.dumps(self._state, separators=(",", ":"))
        return _event("snapshot", f'{{"number":{self._number},"state":{state},"timeline":[{entries}]}}')

    def _begin(self) -> None:
        if self._sampling is None and not self._is_closed:
            self.look()  # if it fails, no task was started
            self._sampling = asyncio.create_task(self._keep_looking())
        self._num_watchers += 1

    def _end(self) -> None:
        self._num_watchers -= 1
        if not self._num_watchers and self._sampling is not None:
            self._sampling.cancel()
            self._sampling = None

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            try:
                self.look()
            except Exception:
                logger.exception("sampling the cluster for the live page failed")


def _event(name: str, data: str) -> bytes:
    return f"event: {name}\ndata: {data}\n\n".encode()
