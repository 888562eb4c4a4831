"""One `baton serve` an address: routers share their port with each other, and so would those of two clusters."""

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
    """Be the only one of this machine who starts or runs a cluster at an address, whoever the others are. On a Ray that
    others run, who may is settled there (``cluster.deploy.claim``).

    Held as a name in the kernel (an abstract socket), which is free again as soon as this process is gone. Only
    Linux has such names.

    Raises:
        PreflightError: Another one does.
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
                    f"another `baton serve` starts or runs on {url}: stop that one, or choose another `port` (--port)"
                ) from error
        yield
