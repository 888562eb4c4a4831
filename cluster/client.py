"""Shared by the commands that call a cluster over HTTP: its URL, the API key, and texts for connection errors."""

from __future__ import annotations

import socket
from typing import Any
from unicodedata import bidirectional, category

import httpx

from cluster.plan.preflight import PreflightError
from router.errors import OWN_ADMIN_KEY_FOLDER

MAX_PORT = 65_535

_TURNS = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})


class NotBatonError(httpx.HTTPError):
    """The server that answered is not a Baton cluster."""


class ClusterGoneError(httpx.HTTPError):
    """A cluster that answered before no longer answers."""

    def __init__(self) -> None:
        super().__init__("the cluster or its router stopped")


def answer_of(response: httpx.Response, *keys: str) -> dict[str, Any]:
    """The JSON object of a response, which must have these keys.

    Raises:
        httpx.HTTPError: The answer is an error, or is not one of Baton's.
    """
    response.raise_for_status()
    try:
        answer = response.json()
    except ValueError as error:
        raise NotBatonError(f"{response.request.url} did not answer with JSON") from error
    if not isinstance(answer, dict) or not all(key in answer for key in keys):
        raise NotBatonError(f"the answer of {response.request.url} lacks {', '.join(keys)}")
    return answer


def explain(error: httpx.HTTPError, url: str) -> str:
    """One line that tells the user why the cluster at ``url`` did not answer as expected."""
    if isinstance(error, httpx.ConnectError) and "SSL" in str(error):
        return f"{url} does not speak TLS ({error}): use http://, unless a TLS proxy is in front of the cluster"
    if isinstance(error, httpx.ConnectError):
        if isinstance(_cause_of(error), socket.gaierror):
            return f"nothing answers at {url}: the host name is unknown; set another URL with --url"
        return f"nothing answers at {url}{_port_hint(url)}: is `baton serve` running there? Set another URL with --url"
    if isinstance(error, ClusterGoneError):
        return f"the cluster at {url} or its router stopped"
    if isinstance(error, NotBatonError):
        return f"the server at {url} is not a Baton cluster: {error}"
    if isinstance(error, httpx.HTTPStatusError):
        return f"{url} answered {error.response.status_code}: {message_of(error.response)}{_remedy_of(error.response)}"
    if isinstance(error, httpx.TimeoutException):
        return f"{url} did not answer in time ({type(error).__name__}): is its machine busy, or is it another server?"
    return f"{url}: {type(error).__name__}: {error}"


def _cause_of(error: BaseException) -> BaseException:
    """The root cause of an error."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def _port_hint(url: str) -> str:
    """A hint for URLs without a port, since HTTP's default port is not Baton's."""
    parsed = httpx.URL(url)
    default = {"http": 80, "https": 443}[parsed.scheme]
    return "" if parsed.port is not None else f" (port {default}; Baton's default is 8000)"


def _remedy_of(response: httpx.Response) -> str:
    if response.status_code == httpx.codes.UNAUTHORIZED:
        is_for_admins = "admin key" in message_of(response)
        hint = f"; set it with --api-key or in the variable {'BATON_ADMIN_KEY' if is_for_admins else 'BATON_API_KEY'}"
        if OWN_ADMIN_KEY_FOLDER in message_of(response):
            return hint
        return (
            f"{hint} (the admin key of a cluster without configured ones is in {OWN_ADMIN_KEY_FOLDER} of the user who "
            "started it, on its machine)"
        )
    if response.status_code == httpx.codes.NOT_FOUND and _openai_message(response) is None:
        return "; is that a Baton cluster? --url must be the base URL of its API, such as http://127.0.0.1:8000/v1"
    return ""


def bearer(api_key: str) -> dict[str, str]:
    """The authorization header for a key; empty without a key.

    Raises:
        PreflightError: The key has characters that a header cannot carry.
    """
    if not api_key.isascii() or not api_key.isprintable():
        raise PreflightError("the API key has characters that are not allowed in keys: use visible ASCII characters")
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def for_terminal(text: str) -> str:
    """Escape the control characters of a text from a cluster, such as ESC to ``\\x1b``, before a terminal prints it.

    Neither the output of models nor messages that repeat other callers' input can be trusted with a terminal.
    """
    return "".join(
        character if character in "\n\t" or not _steers(character) else character.encode("unicode_escape").decode()
        for character in text
    )


def shown(value: Any) -> Any:
    """A JSON value with ``for_terminal`` applied to all its strings."""
    if isinstance(value, str):
        return for_terminal(value)
    if isinstance(value, list):
        return [shown(item) for item in value]
    if isinstance(value, dict):
        return {name: shown(item) for name, item in value.items()}
    return value


def _steers(character: str) -> bool:
    """True for control characters, and for those that change the text direction."""
    return category(character) == "Cc" or bidirectional(character) in _TURNS


def cluster_url(text: str) -> str:
    """The normalized URL of a cluster, from what a user may write: ``localhost:8000``, ``http://localhost:8000/v1/``.

    Raises:
        PreflightError: The text is not a URL of a cluster.
    """
    url = text if "://" in text else f"http://{text}"
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise PreflightError(f"{text!r} is not a URL: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host or not 1 <= (parsed.port or 80) <= MAX_PORT:
        raise PreflightError(f"{text!r} is not an HTTP URL, such as http://127.0.0.1:8000")
    if parsed.query or parsed.fragment:
        raise PreflightError(f"{text!r} is not the URL of a cluster: leave out its query and fragment")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def message_of(response: httpx.Response) -> str:
    """The message in OpenAI's error shape, or the beginning of the body."""
    message = _openai_message(response)
    return response.text[:200] if message is None else message


def code_of(response: httpx.Response) -> str | None:
    """The code of an error in OpenAI's shape; None if there is none."""
    return _of_openai_error(response, "code")


def _openai_message(response: httpx.Response) -> str | None:
    return _of_openai_error(response, "message")


def _of_openai_error(response: httpx.Response, key: str) -> str | None:
    try:
        return str(response.json()["error"][key])
    except (ValueError, KeyError, TypeError):
        return None
