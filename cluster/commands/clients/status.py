"""`baton status`: the workers of a running cluster, as a table or as JSON."""

from __future__ import annotations

import json
from typing import Any

import httpx
from rich.box import SIMPLE
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from cluster.client import answer_of, bearer

TIMEOUT_S = 10.0
MAX_WIDTH = 1000

COLUMNS = (
    ("pool", "pool"),
    ("replica", "replica_id"),
    ("node", "node_ip"),
    ("pid", "pid"),
    ("state", "state"),
    ("KV used", "kv_usage"),
    ("run", "num_running"),
    ("wait", "num_waiting"),
    ("load", "num_loading"),
    ("leased", "num_leased_blocks"),
)
"""Title of a column, and the key of ``/status`` that it shows."""

TOTALS = ("requests", "tokens", "transfers", "transferred_bytes", "failed_blocks", "recomputed_tokens")

RARE_TOTALS = (
    *("failed", "invalid", "refused", "prefill_retries", "migrations", "drain_moves"),
    *("gap_moves", "kv_moves", "queue_moves", "ordered_moves", "failed_moves", "leaning_changes", "divisions"),
)
"""Totals that are shown only when they are not zero."""


def status(url: str, console: Console, *, as_json: bool, api_key: str = "") -> None:
    """Ask the cluster at ``url`` and print what it says.

    Raises:
        httpx.HTTPError: It does not answer, or not well.
    """
    response = httpx.get(f"{url.rstrip('/')}/status", headers=bearer(api_key), timeout=TIMEOUT_S, trust_env=False)
    answer = answer_of(response, "model", "pools")
    if as_json:
        console.print_json(json.dumps(answer))
        return
    print_table(status_table(answer), console)
    if len(routers := answer.get("routers", ())) > 1:
        states = ", ".join(f"{router['router_id']} {router['state']}" for router in routers)
        console.print(Text(f"routers: {states}"), soft_wrap=True)
    console.print(totals_line(answer.get("totals", {})), highlight=False, soft_wrap=True)


def totals_line(totals: dict[str, Any]) -> str:
    """The totals since the start, as one line."""
    names = [*(name for name in TOTALS if name in totals), *(name for name in RARE_TOTALS if totals.get(name))]
    return ", ".join(f"{name} {totals[name]:,}" for name in names)


def print_table(table: Table, console: Console) -> None:
    """Print a table at full width. If it is wider than the console, the terminal wraps it, and no title is cut."""
    needed = Measurement.get(console, console.options.update(max_width=MAX_WIDTH), table).maximum
    console.width = max(needed, console.width)
    console.print(table)


def status_table(answer: dict[str, Any]) -> Table:
    """One row a worker."""
    table = Table(
        title=Text(f"model {answer.get('model')}"), title_justify="left", box=SIMPLE, padding=0, show_edge=False
    )
    for title, _ in COLUMNS:
        table.add_column(title, no_wrap=True)
    for pool, replicas in answer.get("pools", {}).items():
        for replica in replicas:
            shown = {"pool": pool_and_leaning(pool, replica.get("leaning")), **replica}
            table.add_row(*(Text(cell(shown.get(key))) for _, key in COLUMNS))
    return table


def pool_and_leaning(pool: str, leaning: str | None) -> str:
    """The pool of a worker, and the role that it leans to, if that is another one."""
    return pool if leaning in (None, pool) else f"{pool}→{leaning}"


def cell(value: object) -> str:
    """A value in readable form; shares as percentages."""
    if value is None:
        return "-"
    return f"{value:.1%}" if isinstance(value, float) else str(value)
