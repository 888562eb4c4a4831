"""The gate of one stream, shared by the engine's thread and the connector's: may a read begin, is one in flight?"""

from __future__ import annotations

import threading


class StreamGate:
    """Lets reads begin until it is closed. Safe to call from any thread.

    It lets the scheduler cancel a stream without a read in flight at once: its blocks need not wait for an answer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_open = 0
        self._is_closed = False
        self._is_awaited = False

    @property
    def is_awaited(self) -> bool:
        """True when a read was in flight when the gate was closed: the scheduler waits for the end of that read."""
        return self._is_awaited

    @property
    def is_closed(self) -> bool:
        """True once the stream was cancelled."""
        return self._is_closed

    def begin_read(self) -> bool:
        """Ask for permission to write the destination. False when the gate is closed."""
        with self._lock:
            if self._is_closed:
                return False
            self._num_open += 1
            return True

    def end_read(self) -> None:
        """Note that the read in flight ended and writes no more."""
        with self._lock:
            self._num_open -= 1
            assert self._num_open >= 0, "a read ended twice"

    def close(self) -> bool:
        """Let no read begin from now on. Returns True when none is in flight either."""
        with self._lock:
            self._is_closed = True
            self._is_awaited = self._num_open > 0
            return not self._is_awaited
