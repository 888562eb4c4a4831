"""Waits until a cluster's router says that it can serve."""

from __future__ import annotations

import time

import httpx

from cluster.deploy.deployment import StartError

READY_TIMEOUT_S = 120.0
READY_POLL_S = 0.1


def wait_until_ready(url: str, *, timeout_s: float = READY_TIMEOUT_S) -> None:
    """Return when the router at ``url`` sees workers of both kinds.

    Raises:
        StartError: The router does not within ``timeout_s``.
    """
    deadline_s = time.monotonic() + timeout_s
    with httpx.Client(timeout=5.0, trust_env=False) as client:
        while True:
            answer = _ask(client, f"{url}/ready")
            if answer == "":
                return
            if time.monotonic() > deadline_s:
                raise StartError(f"{url} was not ready within {timeout_s:g} s: {answer}")
            time.sleep(READY_POLL_S)


def _ask(client: httpx.Client, url: str) -> str:
    """Why the URL does not answer as it should; empty if it does."""
    try:
        response = client.get(url)
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"
    return "" if response.status_code == httpx.codes.OK else f"HTTP {response.status_code}: {response.text[:200]}"
