"""How much the totals of a cluster grew, even though the routers that keep them may be replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from router.report.status import WORKER_TOTALS

Process: TypeAlias = tuple[str, str | None]
"""A worker's id and incarnation."""


@dataclass(slots=True, kw_only=True)
class _Memory:
    """The totals of a set of routers that know each other: ``base`` at their start, and ``peak``, the highest seen.

    ``earlier`` are the counters that workers had when these routers started, for workers that they do not show yet.
    """

    router_ids: set[str]
    base: dict[str, float]
    peak: dict[str, float]
    earlier: dict[Process, Mapping[str, float]] = field(default_factory=dict)


class Tally:
    """Adds up the totals of /status over time, whichever router answers.

    Routers keep the totals and share them with each other. If all routers are gone at once, new ones start at zero for
    what routers count and for workers that have ended. They do not start at zero for live workers, which report all
    that they ever counted. If a total is a little lower than before, the router has heard less about a process that is
    gone; that is not a new start.
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
        """Add one answer of /status."""
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
        """The memory of the routers that answered. Memories of routers that turn out to know each other are merged."""
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
