"""`baton top`: the cluster in a terminal, as the live page shows it in a browser."""

from __future__ import annotations

import json
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import httpx
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.client import ClusterGoneError, NotBatonError, bearer
from router.live.merge_patch import apply_patch
from router.roles import ROLES

EVENTS_PATH = "/admin/events"
TIMEOUT = httpx.Timeout(10.0)
"""Events are at most a second apart, so a cluster that sends none for this long is gone."""

RECONNECT_TIMEOUT_S = 10.0
"""A router that died is replaced within this time; a cluster that ended never is."""

RECONNECT_PERIOD_S = 0.5

BAR_CELLS = 16
MAX_ENTRIES = 256
NUM_OTHER_LINES = 8
"""Lines of the screen beside those of the workers and of the timeline."""

_OWNERS = (
    ("running", "█", "cyan"),
    ("leased", "█", "yellow"),
    ("loading", "▓", "blue"),
    ("early", "▒", "magenta"),
    ("cached", "░", "cyan"),
)
_STATES = {"running": "green", "draining": "yellow", "starting": "yellow"}
_KINDS = {
    "worker_up": "green",
    **dict.fromkeys(("worker_gone", "worker_left_out", "fault"), "red"),
    **dict.fromkeys(("recovery", "drain", "refusal"), "yellow"),
}


class Seen(NamedTuple):
    """The cluster after an event."""

    state: Mapping[str, Any]
    timeline: tuple[Mapping[str, Any], ...]


def top(url: str, console: Console, *, api_key: str = "") -> None:
    """Show the cluster at ``url`` until q is pressed. If the output is not a terminal, print it once.

    Raises:
        httpx.HTTPError: It does not answer, or not well.
    """
    with (
        httpx.Client(base_url=url, headers=bearer(api_key), timeout=TIMEOUT, trust_env=False) as client,
        closing(watch(client)) as views,
    ):
        if not (console.is_terminal and sys.stdin.isatty()):
            console.print(screen(next(views), width=console.width, max_entries=MAX_ENTRIES))
            return
        _show(views, console)


def watch(
    client: httpx.Client,
    *,
    pause: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Generator[Seen, None, None]:
    """The cluster after each event. While the stream is broken, the last state is repeated.

    Raises:
        ClusterGoneError: The cluster did not answer for ``RECONNECT_TIMEOUT_S``.
        httpx.HTTPError: The cluster did not answer the first time, or not well.
    """
    seen, lost_s = None, None
    while True:
        try:
            with client.stream("GET", EVENTS_PATH) as response:
                if response.is_error:
                    response.read()
                    response.raise_for_status()
                for seen in follow(response.iter_lines()):
                    lost_s = None
                    yield seen
        except httpx.TransportError:
            if seen is None:
                raise
        if seen is None:
            raise NotBatonError(f"{EVENTS_PATH} sent nothing")
        lost_s = clock() if lost_s is None else lost_s
        if clock() - lost_s >= RECONNECT_TIMEOUT_S:
            raise ClusterGoneError
        yield seen
        pause(RECONNECT_PERIOD_S)


def _show(views: Iterable[Seen], console: Console) -> None:
    with keys() as is_quit, Live(console=console, screen=True, auto_refresh=False) as live:
        for seen in views:
            room = max(console.height - len(seen.state["workers"]) - NUM_OTHER_LINES, 1)
            live.update(screen(seen, width=console.width, max_entries=room), refresh=True)
            if is_quit():
                return


@contextmanager
def keys() -> Iterator[Any]:
    """Read keys without Enter; yields a function that says whether q was pressed. Restores the terminal afterwards."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def is_quit() -> bool:
        while select.select([descriptor], [], [], 0)[0]:
            if sys.stdin.read(1) in ("q", "Q", ""):
                return True
        return False

    try:
        tty.setcbreak(descriptor)
        yield is_quit
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def follow(lines: Iterable[str]) -> Generator[Seen, None, None]:
    """The cluster after each event of a stream.

    Raises:
        httpx.HTTPError: The stream is not a cluster's.
    """
    name, seen = "", None
    for line in lines:
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            try:
                seen = _after(seen, name, json.loads(value))
            except (ValueError, KeyError, TypeError) as error:
                raise NotBatonError(f"{EVENTS_PATH} sent data that cannot be read: {value[:80]!r}") from error
            yield seen


def _after(seen: Seen | None, name: str, told: Mapping[str, Any]) -> Seen:
    if name == "snapshot" or seen is None:
        return Seen(told["state"], tuple(told["timeline"]))
    if name == "event":
        return Seen(seen.state, (*seen.timeline, told)[-MAX_ENTRIES:])
    return Seen(apply_patch(seen.state, told["patch"]), seen.timeline)


def screen(seen: Seen, *, width: int, max_entries: int) -> RenderableType:
    """The screen: figures, a line per worker, and the last events, newest first."""
    state = seen.state
    entries = list(seen.timeline)[-max_entries:][::-1]
    return Group(
        _figures(state),
        _workers(state, width=width),
        _legend(),
        *(_entry(entry, width=width) for entry in entries),
    )


def _figures(state: Mapping[str, Any]) -> Text:
    totals, routers, workers = state["totals"], state["routers"].values(), state["workers"].values()
    num_due = max(len(workers), sum(state["wanted"].values()))
    parts = (
        ("model ", state["model"]),
        ("tok/s ", f"{totals['tokens_per_s']:,.0f}"),
        ("prompt tok/s ", f"{totals['prompt_tokens_per_s']:,.0f}"),
        ("running ", f"{sum(router['in_progress'] for router in routers):,}"),
        ("workers ", f"{sum(row['state'] == 'running' for row in workers)}/{num_due}"),
        ("failed ", f"{totals['failed']:,}"),
    )
    text = Text(no_wrap=True, overflow="ellipsis")
    for label, value in parts:
        text.append(label, "dim").append(f"{value}  ", "bold")
    return text


def _place_of(role: str) -> int:
    return list(ROLES).index(role) if role in ROLES else len(ROLES)


def _workers(state: Mapping[str, Any], *, width: int) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("worker", no_wrap=True, max_width=max(width - 68, 8), overflow="ellipsis")
    table.add_column("role", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("KV", no_wrap=True)
    for title in ("run", "wait", "load", "tok/s"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, row in sorted(state["workers"].items(), key=lambda item: (_place_of(item[1]["role"]), item[0])):
        queue = row["queue"]
        role = row["role"] if row["leaning"] == row["role"] else f"{row['role'][:3]}→{row['leaning']}"
        if "keeps_to" in row:
            role = f"{row['role'][:3]}:{row['keeps_to']}s"
        told = row.get("unhealthy", row["state"].replace("_", " "))
        table.add_row(
            Text(name),
            Text(role),
            Text(told, _STATES.get(row["state"], "red")),
            bar(row["kv"]),
            *(f"{queue[key]:,}" for key in ("running", "waiting", "loading")),
            f"{row['tokens_per_s'] + row['prompt_tokens_per_s']:,.0f}",
        )
    return table


def bar(kv: Mapping[str, int]) -> Text:
    """A bar of ``BAR_CELLS`` cells that shows who holds a worker's blocks. Every owner has at least one cell."""
    text, total = Text(), max(kv["total"], 1)
    for owner, sign, colour in _OWNERS:
        cells = round(BAR_CELLS * kv[owner] / total) or int(kv[owner] > 0)
        text.append(sign * min(cells, BAR_CELLS - len(text)), colour)
    return text.append("·" * (BAR_CELLS - len(text)), "dim")


def _legend() -> Text:
    text = Text("KV: ", "dim", no_wrap=True, overflow="ellipsis")
    for owner, sign, colour in _OWNERS:
        text.append(sign, colour).append(f" {owner}  ", "dim")
    return text.append("· free    q ends", "dim")


def _entry(entry: Mapping[str, Any], *, width: int) -> Text:
    at = time.strftime("%H:%M:%S", time.localtime(entry["at_unix_s"]))
    text = Text(f"{at} ", "dim", no_wrap=True, overflow="ellipsis")
    text.append(entry["text"], _KINDS.get(entry["kind"], ""))
    if "replica" in entry:
        text.append(f" {entry['replica']}", "dim")
    text.truncate(width, overflow="ellipsis")
    return text
