"""The timeline of the cluster: a bounded list of entries, newest last, each serialized once."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

MAX_ENTRIES = 256
"""How many entries are kept."""

Kind: TypeAlias = Literal[
    "worker_up",
    "worker_gone",
    "worker_left_out",
    "scale",
    "drain",
    "move",
    "rebalance",
    "lean",
    "divide",
    "recovery",
    "fault",
    "refusal",
    "hand_over",
    "choice",
]
"""The kinds of entries (docs/live-page.md). Readers show unknown kinds like any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """An event in words; ``replica`` is the worker that it concerns, if any."""

    kind: Kind
    text: str
    replica: str | None = None
    count: int = 1


class Entry(NamedTuple):
    """An entry of the timeline, as JSON, with its number."""

    number: int
    text: str


class Timeline:
    """The last entries. They are numbered consecutively, so that a reader knows which ones it has read."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=MAX_ENTRIES)
        self.last_number = 0

    def add(self, happening: Happening, *, at_unix_s: float) -> None:
        """Append an entry; if there are too many, the oldest one is dropped."""
        self.last_number += 1
        told: dict[str, object] = {
            "number": self.last_number,
            "at_unix_s": round(at_unix_s, 3),
            "kind": happening.kind,
            "text": happening.text,
            "count": happening.count,
        }
        if happening.replica is not None:
            told["replica"] = happening.replica
        self._entries.append(Entry(self.last_number, json.dumps(told, separators=(",", ":"))))

    def since(self, number: int) -> Sequence[str]:
        """The JSON of the kept entries after ``number``, oldest first; 0 means all."""
        if number >= self.last_number:
            return ()
        return [entry.text for entry in self._entries if entry.number > number]
