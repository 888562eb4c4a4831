"""How long sources have kept us waiting for bytes, or for a word."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kv_transfer.peer.part_reads import LONGEST_LOOK_S, ReaderLimits


class Silence:
    """Engines from which something is due, and for how long nothing came. Owned by the connector's thread.

    A read ends as a whole, and nothing is heard of it before: large ones have the time that they take over a network of
    ``limits.slowest_bytes_per_s`` besides. What counts is the time in which this thread looked: one that was itself
    stopped finds no source silent when it goes on, but first reads what has come meanwhile.
    """

    def __init__(self, *, clock: Callable[[], float], limits: ReaderLimits) -> None:
        self._clock = clock
        self._limits = limits
        self._looked_s = clock()
        self._waited_s: dict[str, float] = {}

    def look(self, awaited: Iterable[str]) -> None:
        """Add the time since the last look to every engine id of ``awaited``; forget the others."""
        now_s = self._clock()
        elapsed_s = min(now_s - self._looked_s, LONGEST_LOOK_S)
        self._looked_s = now_s
        waited_s = self._waited_s
        self._waited_s = {name: waited_s[name] + elapsed_s if name in waited_s else 0.0 for name in awaited}

    def end(self, engine_id: str) -> None:
        """An engine gave a sign of life."""
        if engine_id in self._waited_s:
            self._waited_s[engine_id] = 0.0

    def is_too_long(self, engine_id: str, num_bytes: int) -> bool:
        """True when nobody should wait any more for this engine, from which so many bytes are being read."""
        limits = self._limits
        return self._waited_s.get(engine_id, 0.0) >= limits.answer_timeout_s + num_bytes / limits.slowest_bytes_per_s
