"""What routers have not been told of an engine yet: changes of its prefix cache, and its load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Final

from engine.contract.errors import EngineDeadError
from engine.contract.messages import CacheChanges, LoadReport
from engine.frontend.engine_core import EngineCore

MAX_WAITING_BYTES = 1 << 20
"""A router with more waiting changes than this gets a snapshot instead."""


class CacheFeed:
    """Changes of the prefix cache in order, beginning with a snapshot.

    ``needs_snapshot``: the next message must begin with one. ``snapshot`` was requested, and is not sent yet.
    """

    def __init__(self) -> None:
        self.needs_snapshot = True
        self.snapshot: asyncio.Task[CacheChanges] | None = None
        self._waiting: list[CacheChanges] = []
        self._num_bytes = 0

    def put(self, changes: CacheChanges) -> None:
        """Add changes."""
        self._waiting.append(changes)
        self._num_bytes += len(changes.stored) + len(changes.removed)
        if self._num_bytes > MAX_WAITING_BYTES:
            self.take()
            self.needs_snapshot = True

    def take(self) -> tuple[CacheChanges, ...]:
        """Take all waiting changes."""
        taken = tuple(self._waiting)
        self._waiting.clear()
        self._num_bytes = 0
        return taken

    async def take_with_snapshot(
        self, ask: Callable[[], Coroutine[Any, Any, CacheChanges]], *, timeout_s: float
    ) -> tuple[CacheChanges, ...]:
        """Take all waiting changes, after a snapshot if one is needed; ``ask`` has the engine make it.

        A snapshot waits for the running step, which may take longer than a report may be late. If it is not there after
        ``timeout_s``, it comes with a later message.
        """
        if self.snapshot is None:
            if not self.needs_snapshot:
                return self.take()
            # Changes from here on are kept; some may be in the snapshot already, which does no harm.
            self.take()
            self.needs_snapshot = False
            self.snapshot = asyncio.create_task(ask())
        await asyncio.wait((self.snapshot,), timeout=timeout_s)
        if not self.snapshot.done():
            return ()
        asked, self.snapshot = self.snapshot, None
        try:
            return (asked.result(), *self.take())
        except EngineDeadError:
            return ()


LOAD_PERIOD_S: Final = 0.1
"""The greatest age of a report while nothing changes but the tokens of running requests."""


class LoadFeed:
    """The load after each turn of an engine's loop. Used only on the thread that steps the engine."""

    def __init__(self, core: EngineCore, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._core = core
        self._clock = clock
        self._report = core.load_report()
        self.told_at_s = clock()
        self._num_changes = core.num_load_changes

    def after_step(self) -> LoadReport:
        """The report; a new one if requests came, started, ended or moved, or if it is ``LOAD_PERIOD_S`` old."""
        if self._core.num_load_changes == self._num_changes and self._clock() - self.told_at_s < LOAD_PERIOD_S:
            return self._report
        return self.now()

    def now(self) -> LoadReport:
        """A new report."""
        self._num_changes = self._core.num_load_changes
        self.told_at_s = self._clock()
        self._report = self._core.load_report()
        return self._report


class SelfReport:
    """An engine's load together with its front end's own facts; a new report is made only when either changes."""

    def __init__(self) -> None:
        self._last: tuple[LoadReport | None, tuple[object, ...], LoadReport] = (None, (), LoadReport())

    def of(
        self,
        load: LoadReport,
        *,
        num_peers: int,
        leaning: str,
        is_draining: bool,
        is_stalled: bool = False,
        has_hung_read: bool = False,
    ) -> LoadReport:
        """The load with these facts."""
        stands = (num_peers, leaning, is_draining, is_stalled, has_hung_read)
        last_load, last_stands, told = self._last
        if last_load is not load or last_stands != stands:
            told = replace(
                load,
                num_peers=num_peers,
                leaning=leaning,
                is_draining=is_draining,
                is_stalled=is_stalled,
                has_hung_read=has_hung_read,
            )
            self._last = (load, stands, told)
        return told
