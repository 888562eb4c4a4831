"""TCP ports for what a test starts."""

from __future__ import annotations

import secrets
import socket

PORTS = range(20_000, 32_000)
"""Above the ports that Ray gives its workers by default, below those that Linux gives to whoever names none."""

MAX_ATTEMPTS = 100


def free_port() -> int:
    """A port of the loopback address that is free now, and that nobody gets who does not ask for it by number.

    A port that the system chose could be given to a connection of a test that runs beside this one, in the seconds
    until the server that it is meant for listens.
    """
    for _ in range(MAX_ATTEMPTS):
        port = PORTS[secrets.randbelow(len(PORTS))]
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"none of {MAX_ATTEMPTS} ports was free")
