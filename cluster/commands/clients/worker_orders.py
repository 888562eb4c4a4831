"""`baton drain` and `baton lean`: a worker lets its requests go to others and exits, or prefers another role's work."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import httpx
from rich.console import Console

from cluster.client import answer_of, bearer

TIMEOUT_S = 15.0
POLL_PERIOD_S = 0.2


def lean(url: str, replica: str, role: str, console: Console, *, api_key: str = "") -> None:
    """Tell a worker which role's work to prefer from now on.

    Raises:
        httpx.HTTPError: The cluster does not answer, or refuses.
    """
    with httpx.Client(base_url=url, headers=bearer(api_key), timeout=TIMEOUT_S, trust_env=False) as client:
        response = client.post("/admin/lean", json={"replica": replica, "role": role})
        answer = answer_of(response, "replica", "before")
    console.print(f"{answer['replica']} now leans to {role}, before it leaned to {answer['before']}", highlight=False)


def drain(url: str, replica: str, console: Console, *, api_key: str = "", wait_s: float | None = None) -> bool:
    """Begin to drain a worker, and wait until it is gone.

    Returns:
        False when it was still there after ``wait_s``.

    Raises:
        httpx.HTTPError: The cluster does not answer, or refuses.
    """
    with httpx.Client(base_url=url, headers=bearer(api_key), timeout=TIMEOUT_S, trust_env=False) as client:
        response = client.post("/admin/drain", json={"replica": replica})
        replica_id: str = answer_of(response, "draining")["draining"]
        started_s = time.monotonic()
        console.print(f"draining {replica_id}: it accepts no more requests", highlight=False)
        limit_s = _limit_s(client)
        with console.status("") as status:
            while row := _row(client, replica_id):
                passed_s = time.monotonic() - started_s
                if wait_s is not None and passed_s > wait_s:
                    console.print(f"{replica_id} still has {row['num_running']} running requests", highlight=False)
                    return False
                status.update(progress(row, passed_s=passed_s, limit_s=limit_s))
                time.sleep(POLL_PERIOD_S)
    console.print(f"{replica_id} is gone after {time.monotonic() - started_s:.1f} s", highlight=False)
    return True


def progress(row: Mapping[str, Any], *, passed_s: float, limit_s: float | None) -> str:
    """The work that the worker still has, and the latest time when it is cut off."""
    parts = [
        f"{row[name]} {what}"
        for name, what in (
            ("num_running", "requests run"),
            ("num_waiting", "wait"),
            ("num_leased_blocks", "KV blocks still leased to other workers"),
        )
        if row[name]
    ]
    text = ", ".join(parts) or "it ends"
    if limit_s is None:
        return text
    return f"{text}; what is left after {max(limit_s - passed_s, 0):.0f} s is cut off and continues on other workers"


def _limit_s(client: httpx.Client) -> float | None:
    """``health.drain_timeout_s`` of the cluster; None if the cluster does not show its settings."""
    answer = client.get("/server_info")
    health = (answer.json().get("config") or {}).get("health") if answer.is_success else None
    return None if health is None else float(health["drain_timeout_s"])


def _row(client: httpx.Client, replica_id: str) -> dict[str, Any] | None:
    pools: dict[str, list[dict[str, Any]]] = answer_of(client.get("/status"), "pools")["pools"]
    rows = [row for pool in pools.values() for row in pool]
    return next((row for row in rows if row["replica_id"] == replica_id and row["state"] == "running"), None)
