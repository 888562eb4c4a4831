"""Which cores a worker's next step computes on: its own, and those borrowed from idle workers of the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from engine.device.core_table import MAX_CORES, CoreTable, CoreTableError, SlotState

LEND_AFTER_NS = 1_000_000
"""How long an owner must have been idle before others borrow its cores: longer than the gap between two steps."""

TEAM_LEND_AFTER_NS = 20_000_000
"""The same for a worker with several own cores. A team of threads that grows or shrinks starts and ends threads, at
tens of microseconds each. Only shrinking to one thread is free: the others just sleep."""

DOUBT_AFTER_NS = 500_000_000
"""A worker whose step began so long ago may have died. The kernel is asked then, and again after each such interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A worker of the host.

    cores: its own. usable: those that it may use at all. borrows: it also uses other workers' cores while they are
        idle.
    """

    cores: frozenset[int]
    usable: frozenset[int]
    borrows: bool


def divide_idle(working: Mapping[int, Owner]) -> dict[int, frozenset[int]]:
    """Divide the cores that no working worker owns among the working ones that borrow.

    Goes core by core; each goes to the borrower with the fewest cores among those that may use it. So the shares differ
    by at most one core where all may use the same cores. Ties go to the lowest worker number.
    """
    busy = {core for owner in working.values() for core in owner.cores}
    takers = {number: working[number] for number in sorted(working) if working[number].borrows}
    idle = {core for taker in takers.values() for core in taker.usable} - busy
    lent: dict[int, set[int]] = {number: set() for number in takers}
    for core in sorted(idle):
        able = [number for number, taker in takers.items() if core in taker.usable]
        lent[min(able, key=lambda number: len(takers[number].cores) + len(lent[number]))].add(core)
    return {number: frozenset(cores) for number, cores in lent.items()}


def choose_own(taken: Collection[frozenset[int]], usable: Collection[int], num_own: int) -> frozenset[int]:
    """The cores of a worker that joins: those with the fewest other owners, lowest numbers first."""
    by_owners = sorted(usable, key=lambda core: (sum(core in cores for cores in taken), core))
    return frozenset(by_owners[:num_own])


class CoreShare:
    """One worker's share of the host's cores. Used from one thread.

    ``own`` are ``num_own`` of the ``usable`` cores (fewer if there are fewer), preferably cores that nobody else owns.
    A worker that does not borrow still takes part: others may borrow its cores while it is idle.

    A look takes microseconds. A borrower returns a core at its first look after the owner began to compute.

    Raises:
        CoreTableError: The workers of this host cannot share a table.
    """

    def __init__(
        self,
        path: Path,
        *,
        usable: Sequence[int],
        num_own: int,
        borrows: bool,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        if not usable or max(usable) >= MAX_CORES:
            raise CoreTableError(
                f"the cores that this process may use, {list(usable)}, are unknown or have numbers above "
                f"{MAX_CORES - 1}"
            )
        self._clock_ns = clock_ns
        self.borrows = borrows
        self._usable = frozenset(usable)
        self._table = CoreTable(path, borrows=borrows, clock_ns=clock_ns)
        self.own = choose_own([self._table.own(other) for other in self._table.others()], self._usable, num_own)
        self._table.admit(self.own, self._usable)
        self._lend_after_ns = LEND_AFTER_NS if len(self.own) == 1 else TEAM_LEND_AFTER_NS
        self._computes = False
        self._cores = self.own
        self._borrowed: frozenset[int] = frozenset()
        self._due: frozenset[int] = frozenset()
        self._generation = -1
        self._others: list[int] = []
        self._working: list[int] | None = None
        self._doubts: dict[int, _Doubt] = {}

    @property
    def num_usable(self) -> int:
        """How many cores this process may use at all."""
        return len(self._usable)

    def begin_step(self) -> frozenset[int]:
        """Announce that this worker computes. Returns the cores that it may use until it asks again."""
        self._table.mark(computes=True)
        self._computes = True
        return self.look()

    def look(self) -> frozenset[int]:
        """The cores that it may use from now on, within a step."""
        generation = self._table.generation
        if generation != self._generation:
            self._learn(generation)
        if self.borrows:
            self._borrow()
        return self._cores

    def rest(self) -> None:
        """Announce that this worker has nothing to compute."""
        if not self._computes:
            return
        self._use(frozenset())
        self._table.mark(computes=False)
        self._computes = False

    def close(self) -> None:
        """Leave the table. Idempotent."""
        self._table.close()

    def _borrow(self) -> None:
        now_ns = self._clock_ns()
        working = [other for other in self._others if self._works(other, self._table.word(other), now_ns)]
        if self._working != working:
            self._working = working
            slot = self._table.slot
            self._due = divide_idle({number: self._owner(number) for number in (*working, slot)})[slot]
        if self._due != self._borrowed:
            # A core that is due to this worker may still be in use by its borrower, who returns it at its next look.
            held = frozenset[int]().union(*(self._table.used(other) for other in working))
            self._use(self._due & (self._borrowed | (self._due - held)))

    def _works(self, slot: int, word: int, now_ns: int) -> bool:
        computes, _, since_ns = SlotState.of(word)
        age_ns = now_ns - since_ns
        if not computes:
            return word != 0 and age_ns < self._lend_after_ns
        return age_ns < DOUBT_AFTER_NS or self._lives(slot, word, now_ns)

    def _lives(self, slot: int, word: int, now_ns: int) -> bool:
        """Whether the process of a slot that has not changed for long still lives."""
        known = self._doubts.get(slot)
        if known is None or known.word != word or now_ns - known.asked_ns >= DOUBT_AFTER_NS:
            known = self._doubts[slot] = _Doubt(word, now_ns, self._table.is_held(slot))
        return known.lives

    def _owner(self, slot: int) -> Owner:
        return Owner(
            cores=self._table.own(slot),
            usable=self._table.usable(slot),
            borrows=SlotState.of(self._table.word(slot)).borrows,
        )

    def _learn(self, generation: int) -> None:
        """Read who is there. If some cores have no owner, move away from cores that others own too."""
        self._generation, self._others, self._working = generation, self._table.others(), None
        taken = [self._table.own(other) for other in self._others]
        owned = frozenset[int]().union(*taken)
        if not self.own & owned or self._usable <= owned | self.own:
            return
        with self._table.changing() as may_change:
            if not may_change or self._table.generation != generation:
                self._generation = -1  # look again next time, when the other worker's change is complete
                return
            self.own = choose_own(taken, self._usable, len(self.own))
            self._table.change_own(self.own)
            self._generation = self._table.generation
        self._use(frozenset())

    def _use(self, borrowed: frozenset[int]) -> None:
        """Publish which cores this worker's steps use from now on."""
        cores = self.own | borrowed
        if cores != self._cores:
            self._table.use(cores)
        self._borrowed, self._cores = borrowed, cores


class _Doubt(NamedTuple):
    """The kernel's last answer to whether the worker of a slot is alive, for the slot's word at that time."""

    word: int
    asked_ns: int
    lives: bool
