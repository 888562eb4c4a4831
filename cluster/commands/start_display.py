"""Shows the progress of a starting cluster: as bars on a terminal, elsewhere line by line."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from cluster.serve.start_report import StartReport

LINE_PERIOD_S = 10.0
"""How often, if the output is not a terminal, a line about the progress of a stage is printed."""


@dataclass(slots=True, kw_only=True)
class _Pace:
    """The first progress seen of a stage, and when it was last printed."""

    stage: str
    since_s: float
    first_done: int
    told_at_s: float

    def left(self, *, done: int, total: int, now_s: float) -> str:
        """A text with the time left at the present pace; empty if it is not known."""
        more, passed_s = done - self.first_done, now_s - self.since_s
        if more <= 0 or passed_s <= 0 or done >= total:
            return ""
        left_s = round((total - done) * passed_s / more)
        return f"about {left_s // 60} min {left_s % 60} s left" if left_s >= 60 else f"about {left_s} s left"


class StartDisplay:
    """One bar for the whole cluster, and one for each worker that has reported."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._started_at_s = clock()
        self._paces: dict[str, _Pace] = {}
        self._bars: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[stage]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def stage(self, text: str) -> None:
        """Show the current stage of the start."""
        self._show("baton", text)

    def workers(self, reports: Sequence[StartReport], status: str) -> None:
        """Show the last report of every worker. Its type is ``deployment.Progress``."""
        for report in sorted(reports, key=lambda item: (item.role, item.replica_id)):
            self._show(f"{report.role} {report.replica_id}", report.stage, done=report.done, total=report.total)
        if status == "RUNNING" and not reports:  # no worker had to start
            self._show("baton", "workers and router run")
            return
        num_ready = sum(report.stage == "ready" for report in reports)
        self._show("baton", f"starting workers and router, {num_ready} workers ready ({status.lower()})")

    def _show(self, name: str, stage: str, *, done: int = 0, total: int = 0) -> None:
        now_s = self._clock()
        pace = self._paces.get(name)
        is_new = pace is None or pace.stage != stage
        if pace is None or is_new:
            pace = self._paces[name] = _Pace(stage=stage, since_s=now_s, first_done=done, told_at_s=now_s)
        left = pace.left(done=done, total=total, now_s=now_s)
        if self._console.is_terminal:
            self._draw(name, stage, done=done, total=total, left=left)
        elif is_new:
            self._print(name, stage)
        elif left and now_s - pace.told_at_s >= LINE_PERIOD_S:
            pace.told_at_s = now_s
            self._print(name, f"{stage}, {100 * done // total} %, {left}")

    def _draw(self, name: str, stage: str, *, done: int, total: int, left: str) -> None:
        if name not in self._bars:
            self._bars[name] = self._progress.add_task(name, stage=stage, left=left, total=None)
        finished = stage == "ready"
        self._progress.update(
            self._bars[name],
            stage=stage,
            left=left,
            completed=1 if finished else done,
            total=1 if finished else (total or None),
        )

    def _print(self, name: str, text: str) -> None:
        self._console.print(f"[{self._clock() - self._started_at_s:5.1f} s] {name}: {text}", markup=False)
