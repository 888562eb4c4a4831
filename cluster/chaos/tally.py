"""How much the totals of a cluster grew, though those who keep them come and go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from router.report.status import WORKER_TOTALS

Process: TypeAlias = tuple[str, str | None]
"""A worker's id and incarnation."""


@dataclass(slots=True, kw_only=True)
class _Memory:
    """What routers that know of each other tell: the totals that they began with, and the most that they told of.

    ``earlier`` is what workers had counted when these routers came, as far as none of them has told of it yet.
    """

    router_ids: set[str]
    base: dict[str, float]
    peak: dict[str, float]
    earlier: dict[Process, Mapping[str, float]] = field(default_factory=dict)


class Tally:
    """Takes what /status says from time to time, whichever router is asked.

    Routers keep the totals and tell each other. When all were gone at once those that come later begin at zero with
    what routers count and with workers that went before, but not with workers that lived on: these tell again of all
    that they ever counted. A total that is a little less than before is that of a router which heard less of somebody
    who is gone, and no beginning.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._memories: list[_Memory] = []
        self._workers: dict[Process, Mapping[str, float]] = {}

    @property
    def counted(self) -> dict[str, float]:
        """How much each total grew since the first status."""
        return {
            name: sum(max(memory.peak[name] - memory.base[name], 0) for memory in self._memories)
            for name in self._names
        }

    def note(self, status: Mapping[str, Any]) -> None:
        """Take one answer of /status."""
        totals = {name: float(status["totals"][name]) for name in self._names}
        workers: dict[Process, Mapping[str, float]] = {
            (row["replica_id"], row["incarnation"]): row["counters"]
            for rows in status["pools"].values()
            for row in rows
            if row["counters"]
        }
        memory = self._memory_of({row["router_id"] for row in status["routers"]}, totals)
        for process in workers.keys() & memory.earlier.keys():
            counters = memory.earlier.pop(process)
            for name in self._names:
                memory.base[name] += counters.get(WORKER_TOTALS.get(name, ""), 0)
        for name, value in totals.items():
            memory.peak[name] = max(memory.peak[name], value)
        self._workers.update(workers)

    def _memory_of(self, router_ids: set[str], totals: Mapping[str, float]) -> _Memory:
        """That of the routers that answered; a router that had not heard of the others yet was no beginning."""
        known = [memory for memory in self._memories if memory.router_ids & router_ids]
        if known:
            memory = known[0]
            memory.router_ids |= router_ids
            self._memories = [other for other in self._memories if other is memory or other not in known]
            return memory
        base = dict.fromkeys(self._names, 0.0) if self._memories else dict(totals)
        earlier = dict(self._workers) if self._memories else {}
        memory = _Memory(router_ids=router_ids, base=base, peak=dict(base), earlier=earlier)
        self._memories.append(memory)
        return memory
