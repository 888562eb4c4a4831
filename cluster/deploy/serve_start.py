"""Starts Serve without waiting for its proxies, so that replicas start at the same time.

`serve.start` waits for the proxies first: on 2 cores 1.5 s, in which one core is idle. This module uses private parts
of Serve instead. Ray is pinned to one version, and every test with a cluster would show a change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import ray
from ray import serve
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.serve._private.api import _create_controller_and_proxy_refs
from ray.serve._private.client import ServeControllerClient
from ray.serve.config import ControllerOptions
from ray.serve.context import _get_global_client, _set_global_client
from ray.serve.exceptions import RayServeException

PROXY_TIMEOUT_S = 300.0
PORT_PATIENCE_S = 10.0
"""How long to wait for a port that a proxy which is ending may still hold."""

POLL_PERIOD_S = 0.5
ASK_TIMEOUT_S = 30.0
PORT_IS_TAKEN = "Failed to bind to address"
"""Serve's error message for a port that is in use."""


ProxyPlace = Literal["EveryNode", "HeadOnly", "Disabled"]
"""On which machines Serve runs proxies, as Serve's setting."""


class ProxyError(Exception):
    """A proxy of Serve does not listen."""


def begin_serve(*, host: str, port: int, location: ProxyPlace) -> Sequence[Any] | None:
    """Start Serve's controller if none runs. Returns references to wait for until its proxies listen, for those that
    exist already; None if Serve already ran, or is to have no proxies."""
    http_options = {"host": host, "port": port}
    if _get_global_client(raise_if_no_controller_running=False) is not None:
        serve.start(proxy_location=location, http_options=http_options)
        return None
    controller, proxies = _create_controller_and_proxy_refs(
        http_options, None, None, None, ControllerOptions(), location
    )
    _set_global_client(ServeControllerClient(controller))  # type: ignore[no-untyped-call]
    return tuple(proxies) if location != "Disabled" else None


def ask_for_proxies() -> Sequence[Any]:
    """The references to wait for until Serve's current proxies listen.

    Raises:
        RayError, RayServeException: Serve does not answer, or is gone.
    """
    client: Any = _get_global_client()
    proxies: Mapping[str, Any] = ray.get(client._controller.get_proxies.remote(), timeout=ASK_TIMEOUT_S)
    return [proxy.ready.remote() for proxy in proxies.values()]


def wait_for_proxies(
    proxies: Sequence[Any] | None,
    *,
    timeout_s: float = PROXY_TIMEOUT_S,
    ask: Callable[[], Sequence[Any]] = ask_for_proxies,
    get: Callable[..., Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Return when all proxies listen. Serve may replace a proxy that starts too slowly, as on a busy machine; then its
    replacement is waited for.

    Raises:
        ProxyError: A proxy cannot listen, or does not in time.
    """
    if proxies is None:
        return
    deadline_s = clock() + timeout_s
    refused_s: float | None = None
    waiting, last = list(proxies), ""
    while True:
        if waiting:
            error = _error_of(waiting, get or ray.get, timeout_s=max(deadline_s - clock(), 0.0))
            if error is None:
                return
            if isinstance(error, GetTimeoutError):
                raise _too_late(timeout_s, last)
            if isinstance(error, RayActorError):
                last = f"; Serve replaced one: {last_line(error)}"
            else:
                refused_s = refused_s if refused_s is not None else clock()
                _refuse_unless_port(error, for_s=clock() - refused_s)
        if clock() >= deadline_s:
            raise _too_late(timeout_s, last)
        pause(POLL_PERIOD_S)
        try:
            waiting = list(ask())
        except (RayError, RayServeException) as error:
            raise ProxyError(f"Serve ended while its proxies started: {last_line(error)}") from error


def _error_of(proxies: Sequence[Any], get: Callable[..., Any], *, timeout_s: float) -> Exception | None:
    """Why not all proxies listen; None when they do."""
    try:
        get(proxies, timeout=timeout_s)
    except (RayError, OSError, RuntimeError) as error:
        return error
    return None


def _refuse_unless_port(error: Exception, *, for_s: float) -> None:
    """Return if the error is a port in use that may still become free.

    Raises:
        ProxyError: The port has been in use for too long, or the error is another one.
    """
    if PORT_IS_TAKEN not in str(error):
        raise ProxyError(f"a proxy of Serve did not start: {last_line(error)}") from error
    if for_s >= PORT_PATIENCE_S:
        raise ProxyError(
            f"a proxy of Serve cannot listen: {last_line(error)}; stop the program that uses it, or choose "
            "another `host` or `port`"
        ) from error


def _too_late(timeout_s: float, last: str) -> ProxyError:
    return ProxyError(
        f"Serve's proxies were not ready within {timeout_s:g} s{last}; the machine may be too busy: try again when "
        "less else runs there, or raise `startup_timeout_s`"
    )


def last_line(error: Exception) -> str:
    """The reason at the end of Ray's message, which often follows another process's traceback."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
