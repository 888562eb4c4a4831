"""Who computes on which of a host's cores: a rule that every worker follows by itself, and so all find the same."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A worker of the host.

    cores: its own. usable: those that it may use at all. borrows: it also takes others' while they are idle.
    """

    cores: frozenset[int]
    usable: frozenset[int]
    borrows: bool


def divide_idle(working: Mapping[int, Owner]) -> dict[int, frozenset[int]]:
    """The cores that none of those who work owns, divided among those of them who borrow.

    A core after the other, each goes to the one of them with the fewest cores, so that nobody stays behind by more
    than one core that it may use. The numbers of workers break ties.
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
    """The cores of a worker that comes: those that the fewest others own, the first of them."""
    by_owners = sorted(usable, key=lambda core: (sum(core in cores for cores in taken), core))
    return frozenset(by_owners[:num_own])
