"""How many connections a server holds, and which one goes for a new one."""

from __future__ import annotations

import logging
import resource
import sys
from collections import OrderedDict
from typing import Protocol

logger = logging.getLogger(f"baton.{__name__}")

FILES_SHARE = 0.75
"""So much of the files that a process may open can be clients' connections; workers' and logs need some, too."""

QUIET_SHARE = 0.9
"""The limit is told of again once fewer than so much of it were open in between."""


class Connection(Protocol):
    """What a client is connected by."""

    def drop(self) -> None:
        """Close it at once."""


class ConnectionRoom:
    """The connections of one server that wait for a request, longest first.

    Where there are too many, the one that waits longest goes for each that comes, a client that keeps it for later or
    one that never sends anything, so that health checks are answered whatever idles. Only where all others are being
    answered is a new one turned away.
    """

    def __init__(self, max_connections: int) -> None:
        """``max_connections``, or as many as the process may open files for."""
        self._max_connections = min(max_connections, _max_of_files())
        self._waiting: OrderedDict[Connection, None] = OrderedDict()
        self._is_told = False

    def wait(self, connection: Connection) -> None:
        """Know that a connection waits for a request from now on."""
        self._waiting[connection] = None

    def end_waiting(self, connection: Connection) -> None:
        """Know that it does so no more. Idempotent."""
        self._waiting.pop(connection, None)

    def admit(self, num_open: int) -> bool:
        """Whether a new connection may stay, which is one of ``num_open``; another one may go for it."""
        if num_open <= self._max_connections:
            self._is_told = self._is_told and num_open > self._max_connections * QUIET_SHARE
            return True
        if not self._is_told:
            self._is_told = True
            logger.warning(
                "%d connections are open, which is the limit (security.max_connections, and %d %% of the open files "
                "that the system allows): those that wait longest for a request are closed for new ones",
                self._max_connections,
                int(FILES_SHARE * 100),
            )
        if not self._waiting:
            return False
        longest, _ = self._waiting.popitem(last=False)
        longest.drop()
        return True


def _max_of_files() -> int:
    """Connections for which the process may open files."""
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if num_files == resource.RLIM_INFINITY else int(num_files * FILES_SHARE)
