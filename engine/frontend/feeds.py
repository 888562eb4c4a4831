"""What routers have not been told yet of an engine: changes of its prefix cache, and its load."""

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
"""A router that is further behind gets everything anew."""


class CacheFeed:
    """Changes in order, from a snapshot on. ``needs_snapshot`` says that the next message must begin with one.

    ``snapshot`` is one that was asked for and not told yet.
    """

    def __init__(self) -> None:
        self.needs_snapshot = True
        self.snapshot: asyncio.Task[CacheChanges] | None = None
        self._waiting: list[CacheChanges] = []
        self._num_bytes = 0

    def put(self, changes: CacheChanges) -> None:
        """Add what happened."""
        self._waiting.append(changes)
        self._num_bytes += len(changes.stored) + len(changes.removed)
        if self._num_bytes > MAX_WAITING_BYTES:
            self.take()
            self.needs_snapshot = True

    def take(self) -> tuple[CacheChanges, ...]:
        """All that waits."""
        taken = tuple(self._waiting)
        self._waiting.clear()
        self._num_bytes = 0
        return taken

    async def take_with_snapshot(
        self, ask: Callable[[], Coroutine[Any, Any, CacheChanges]], *, timeout_s: float
    ) -> tuple[CacheChanges, ...]:
        """All that waits, behind a snapshot where one is needed, which ``ask`` has the engine make.

        A snapshot waits for the step that runs, which may take longer than anybody waits for a report: one that is not
        there after ``timeout_s`` comes with a later message.
        """
        if self.snapshot is None:
            if not self.needs_snapshot:
                return self.take()
            # What happens from here on is kept: some of it may be in the snapshot already, which does no harm.
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
"""How old a report may be where running requests have only grown since."""


class LoadFeed:
    """The load after each turn of an engine's loop. Asked by the thread that steps the engine."""

    def __init__(self, core: EngineCore, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._core = core
        self._clock = clock
        self._report = core.load_report()
        self.told_at_s = clock()
        self._num_changes = core.num_load_changes

    def after_step(self) -> LoadReport:
        """The report, a new one if requests came, started, ended or moved, or if it is ``LOAD_PERIOD_S`` old."""
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
    """An engine's load with what its front end knows besides, made once for as long as neither changes."""

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
        """The load with these."""
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
