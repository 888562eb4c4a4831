"""Shows on a terminal, or line by line elsewhere, how far a starting cluster is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from cluster.serve.start_report import StartReport


class StartDisplay:
    """One bar for the whole, and one for each worker that said something."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started_at_s = time.monotonic()
        self._said: dict[str, str] = {}
        self._bars: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[stage]}"),
            TimeElapsedColumn(),
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
        """Say what happens now."""
        self._show("baton", text)

    def workers(self, reports: Sequence[StartReport], status: str) -> None:
        """Show what every worker said last; fits ``deployment.Progress``."""
        for report in sorted(reports, key=lambda item: (item.role, item.replica_id)):
            self._show(f"{report.role} {report.replica_id}", report.stage, done=report.done, total=report.total)
        num_ready = sum(report.stage == "ready" for report in reports)
        self._show("baton", f"starting workers and router, {num_ready} workers ready ({status.lower()})")

    def _show(self, name: str, stage: str, *, done: int = 0, total: int = 0) -> None:
        if self._console.is_terminal:
            if name not in self._bars:
                self._bars[name] = self._progress.add_task(name, stage=stage, total=None)
            finished = stage == "ready"
            self._progress.update(
                self._bars[name],
                stage=stage,
                completed=1 if finished else done,
                total=1 if finished else (total or None),
            )
        elif self._said.get(name) != stage:
            self._console.print(f"[{time.monotonic() - self._started_at_s:5.1f} s] {name}: {stage}", markup=False)
        self._said[name] = stage
