"""`baton lean`: a worker prefers the work of another role."""

from __future__ import annotations

import httpx
from rich.console import Console

from cluster.client import answer_of, bearer

TIMEOUT_S = 15.0


def lean(url: str, replica: str, role: str, console: Console, *, api_key: str = "") -> None:
    """Tell a worker which role's work to prefer from now on.

    Raises:
        httpx.HTTPError: The cluster does not answer, or refuses.
    """
    with httpx.Client(base_url=url, headers=bearer(api_key), timeout=TIMEOUT_S, trust_env=False) as client:
        response = client.post("/admin/lean", json={"replica": replica, "role": role})
        answer = answer_of(response, "replica", "before")
    console.print(f"{answer['replica']} leans to {role}, before to {answer['before']}", highlight=False)
