"""Why a command that talks HTTP to a cluster cannot."""

from __future__ import annotations

import httpx


def explain(error: httpx.HTTPError, url: str) -> str:
    """One line for somebody who expected a cluster at ``url``."""
    if isinstance(error, httpx.ConnectError):
        return f"nothing answers at {url}: is `baton serve` running there?"
    if isinstance(error, httpx.HTTPStatusError):
        return f"{url} answered {error.response.status_code}: {message_of(error.response)}"
    return f"{url}: {type(error).__name__}: {error}"


def message_of(response: httpx.Response) -> str:
    """The message in OpenAI's error shape, or the beginning of the body."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
