"""`baton drain`: a worker lets its requests go to others, and exits."""

from __future__ import annotations

import time
from typing import Any

import httpx
from rich.console import Console

from cluster.client import answer_of, bearer

TIMEOUT_S = 15.0
POLL_PERIOD_S = 0.2


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
        console.print(f"draining {replica_id}: it takes no more requests", highlight=False)
        while row := _row(client, replica_id):
            if wait_s is not None and time.monotonic() - started_s > wait_s:
                console.print(f"{replica_id} still has {row['num_running']} running requests", highlight=False)
                return False
            time.sleep(POLL_PERIOD_S)
    console.print(f"{replica_id} is gone after {time.monotonic() - started_s:.1f} s", highlight=False)
    return True


def _row(client: httpx.Client, replica_id: str) -> dict[str, Any] | None:
    pools: dict[str, list[dict[str, Any]]] = answer_of(client.get("/status"), "pools")["pools"]
    rows = [row for pool in pools.values() for row in pool]
    return next((row for row in rows if row["replica_id"] == replica_id and row["state"] == "running"), None)
