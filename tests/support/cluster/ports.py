"""TCP ports for processes that tests start."""

from __future__ import annotations

import secrets
import socket

PORTS = range(20_000, 32_000)
"""Above the ports that Ray assigns to its workers by default, and below Linux's ephemeral ports."""

MAX_ATTEMPTS = 100


def free_port() -> int:
    """A free port of the loopback address that the system does not assign to others by itself.

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
