"""Checks that the Ray which `auto` or a loopback address stands for can be reached at all.

Ray connects to the machine's own address instead of a loopback address. Where nothing listens there, as with a private
Ray, which keeps to the loopback address, it tries for minutes.
"""

from __future__ import annotations

import socket
from typing import Final

from ray._private.services import canonicalize_bootstrap_address_or_die

TIMEOUT_S: Final = 5.0

KEEPS_TO_ITSELF: Final = "keeps to the loopback address, as the private Ray of a `baton serve` does"
NOBODY_ANSWERS: Final = "nothing answers there"


def check_reachable(address: str) -> None:
    """Refuse a Ray that Ray itself would try to reach in vain. Other addresses than those above are not checked here.

    Raises:
        ConnectionError, ValueError: It cannot be reached, there is none, or the address is none.
    """
    found = canonicalize_bootstrap_address_or_die(address)
    host, _, port_text = found.rpartition(":")
    if found == address or not port_text.isdecimal():
        return
    port = int(port_text)
    if _answers(host.strip("[]"), port):
        return
    for loopback in ("127.0.0.1", "::1"):
        if _answers(loopback, port):
            raise ConnectionError(f"the one on port {port} {KEEPS_TO_ITSELF}")
    raise ConnectionError(f"it should be at {found}, but {NOBODY_ANSWERS}")


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=TIMEOUT_S).close()
    except OSError:
        return False
    return True
