"""Allows one `baton serve` per address. Routers share their port, so two clusters at one address would mix."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator

from cluster.config.api_url import base_url
from cluster.config.config import BatonConfig
from cluster.plan.preflight import PreflightError


@contextlib.contextmanager
def holding_address(config: BatonConfig) -> Iterator[None]:
    """Hold an address exclusively on this machine, against all users, while a cluster starts or runs there. On a shared
    Ray nothing is held: there a claim decides (``cluster.deploy.claim``).

    The address is held as a name in the kernel (an abstract socket), which is free again as soon as this process is
    gone. Only Linux has such names.

    Raises:
        PreflightError: Another process holds the address.
    """
    if config.address is not None:
        yield
        return
    url = base_url(config).replace("//localhost:", "//127.0.0.1:")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as name:
        try:
            name.bind(f"\0baton-serve {url}")
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PreflightError(
                    f"another `baton serve` runs or is starting on {url}: stop it, or choose another `port` (--port)"
                ) from error
        yield
