"""Bounds a server's open connections, and chooses which one to close for a new one."""

from __future__ import annotations

import logging
import resource
import sys
from collections import OrderedDict
from typing import Protocol

logger = logging.getLogger(f"baton.{__name__}")

FILES_SHARE = 0.75
"""Share of a process's file limit for clients' connections; workers' connections and logs need files, too."""

QUIET_SHARE = 0.9
"""The limit is logged again only after the open connections fell below this share of it."""


class Connection(Protocol):
    """A client's connection."""

    def drop(self) -> None:
        """Close it at once."""


class ConnectionRoom:
    """The connections of one server that wait for a request, the longest-waiting first.

    At the limit, each new connection closes the one that has waited longest, whether it is kept alive for later or has
    never sent anything. So idle connections cannot block health checks. A new connection is refused only if all others
    are being answered.
    """

    def __init__(self, max_connections: int) -> None:
        """``max_connections``, or as many as the process may open files for."""
        self._max_connections = min(max_connections, _max_of_files())
        self._waiting: OrderedDict[Connection, None] = OrderedDict()
        self._is_told = False

    def wait(self, connection: Connection) -> None:
        """Note that a connection waits for a request from now on."""
        self._waiting[connection] = None

    def end_waiting(self, connection: Connection) -> None:
        """Note that a connection no longer waits. Idempotent."""
        self._waiting.pop(connection, None)

    def admit(self, num_open: int) -> bool:
        """Decide whether a new connection, one of ``num_open``, may stay; this may close another one."""
        if num_open <= self._max_connections:
            self._is_told = self._is_told and num_open > self._max_connections * QUIET_SHARE
            return True
        if not self._is_told:
            self._is_told = True
            logger.warning(
                "%d connections are open, which is the limit (security.max_connections, and %d %% of the open files "
                "that the system allows): each new one closes the one that has waited longest for a request",
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
