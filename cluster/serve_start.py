"""Starts Serve without waiting for its proxies, so that replicas start beside them.

`serve.start` waits first: on 2 cores 1.5 s in which one of them does nothing. What stands for it here is private to
Serve, and Ray is pinned to one version; every test with a cluster would show a change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray import serve
from ray.exceptions import GetTimeoutError, RayError
from ray.serve._private.api import _create_controller_and_proxy_refs
from ray.serve._private.client import ServeControllerClient
from ray.serve.config import ControllerOptions
from ray.serve.context import _get_global_client, _set_global_client

PROXY_TIMEOUT_S = 60.0


class ProxyError(Exception):
    """A proxy of Serve cannot listen."""


def begin_serve(*, host: str, port: int, on_every_node: bool) -> Sequence[Any]:
    """Start Serve's controller where none runs; what to wait for until its proxies listen."""
    http_options = {"host": host, "port": port}
    location = "EveryNode" if on_every_node else "HeadOnly"
    if _get_global_client(raise_if_no_controller_running=False) is not None:
        serve.start(proxy_location=location, http_options=http_options)
        return ()
    controller, proxies = _create_controller_and_proxy_refs(
        http_options, None, None, None, ControllerOptions(), location
    )
    _set_global_client(ServeControllerClient(controller))  # type: ignore[no-untyped-call]
    return tuple(proxies)


def wait_for_proxies(proxies: Sequence[Any], *, timeout_s: float = PROXY_TIMEOUT_S) -> None:
    """Return when all of them listen.

    Raises:
        ProxyError: One cannot, or has not in time.
    """
    try:
        ray.get(list(proxies), timeout=timeout_s)
    except GetTimeoutError as error:
        raise ProxyError(f"Serve's proxies did not listen within {timeout_s:g} s") from error
    except (RayError, OSError, RuntimeError) as error:
        raise ProxyError(
            f"a proxy of Serve cannot listen: {last_line(error)}; end what uses the port on its machine, or choose "
            "another `host` or `port`"
        ) from error


def last_line(error: Exception) -> str:
    """The reason at the end of what Ray says, often after somebody else's traceback."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
