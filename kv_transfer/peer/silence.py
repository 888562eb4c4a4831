"""How long sources have been silent while we wait for data or a message from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kv_transfer.peer.part_reads import LONGEST_LOOK_S, ReaderLimits


class Silence:
    """The engines that we wait for, and how long each has been silent. Owned by the connector's thread.

    A read gives no sign of life before it ends. So a large read is allowed additional time: what it takes over a
    network of ``limits.slowest_bytes_per_s``. Only time during which this thread looks regularly counts. If the thread
    itself was stopped, it finds no source silent when it goes on, and first reads what has arrived.
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
        """Note a sign of life from an engine."""
        if engine_id in self._waited_s:
            self._waited_s[engine_id] = 0.0

    def is_too_long(self, engine_id: str, num_bytes: int) -> bool:
        """True when this engine has been silent for too long, given that ``num_bytes`` are being read from it."""
        limits = self._limits
        return self._waited_s.get(engine_id, 0.0) >= limits.answer_timeout_s + num_bytes / limits.slowest_bytes_per_s
