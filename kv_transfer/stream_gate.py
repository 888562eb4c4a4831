"""Where the engine's thread and the connector's meet over one stream: may a read of it begin, and is one under way?"""

from __future__ import annotations

import threading


class StreamGate:
    """Lets reads begin until it is closed. Safe to call from any thread.

    Because of it a stream without a read in flight can be cancelled at once: its blocks need not wait for an answer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_open = 0
        self._is_closed = False
        self._is_awaited = False

    @property
    def is_awaited(self) -> bool:
        """True when a read was under way as it was closed: somebody waits for its end."""
        return self._is_awaited

    @property
    def is_closed(self) -> bool:
        """True once nobody wants the stream any more."""
        return self._is_closed

    def begin_read(self) -> bool:
        """Ask to write the destination; False when the gate is closed."""
        with self._lock:
            if self._is_closed:
                return False
            self._num_open += 1
            return True

    def end_read(self) -> None:
        """A read that began writes no more."""
        with self._lock:
            self._num_open -= 1
            assert self._num_open >= 0, "a read ended twice"

    def close(self) -> bool:
        """Let no read begin from now on; True when none is under way either."""
        with self._lock:
            self._is_closed = True
            self._is_awaited = self._num_open > 0
            return not self._is_awaited
