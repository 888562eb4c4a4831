"""The display while a cluster starts: the current stage, and how long the rest of a stage will take."""

from __future__ import annotations

import io

from rich.console import Console

from cluster.commands.start_display import StartDisplay
from cluster.serve.start_report import StartReport


class Clock:
    """Time as the test says."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def loading(done: int) -> list[StartReport]:
    return [StartReport(role="decode", replica_id="abc", stage="loading weights", done=done, total=1000)]


def shown(*, is_terminal: bool, dones: tuple[int, ...], period_s: float) -> str:
    clock = Clock()
    console = Console(file=io.StringIO(), width=200, force_terminal=is_terminal, color_system=None)
    with StartDisplay(console, clock=clock) as display:
        for done in dones:
            display.workers(loading(done), "DEPLOYING")
            clock.now_s += period_s
        if is_terminal:
            [left] = [task.fields["left"] for task in display._progress.tasks if "abc" in task.description]
            return str(left)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_lines_say_how_far_weights_are_and_how_long_the_rest_takes() -> None:
    lines = shown(is_terminal=False, dones=(0, 50, 100, 150, 200), period_s=5.0).splitlines()

    weights = [line.partition("abc: ")[2] for line in lines if "abc" in line]
    assert weights == [
        "loading weights",
        "loading weights, 10 %, about 1 min 30 s left",
        "loading weights, 20 %, about 1 min 20 s left",
    ]
    assert sum("0 workers ready" in line for line in lines) == 1


def test_terminal_says_how_long_the_rest_takes() -> None:
    assert shown(is_terminal=True, dones=(0, 500), period_s=20.0) == "about 20 s left"


def test_nothing_is_promised_of_what_has_not_moved() -> None:
    assert shown(is_terminal=True, dones=(0, 0), period_s=20.0) == ""
    assert shown(is_terminal=True, dones=(0, 1000), period_s=20.0) == ""


def test_cluster_that_runs_already_is_said_to_run() -> None:
    console = Console(file=io.StringIO(), width=200)
    with StartDisplay(console) as display:
        display.workers([], "RUNNING")

    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert "workers and router run" in text
    assert "0 workers" not in text
