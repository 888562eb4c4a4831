"""Who computes on which core: whatever workers do, no core is given to two of them for longer than a step, and none
stays idle while somebody computes who may borrow it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.device import core_table
from engine.device.core_share import (
    DOUBT_AFTER_NS,
    LEND_AFTER_NS,
    TEAM_LEND_AFTER_NS,
    CoreShare,
    Owner,
    choose_own,
    divide_idle,
)
from engine.device.core_table import CoreTableError, remove_left_over, table_path


class Clock:
    """A clock in nanoseconds that tests advance."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def __call__(self) -> int:
        """Now."""
        return self.now_ns


class Host:
    """Workers that meet at one file."""

    def __init__(self, path: Path, num_cores: int, stack: ExitStack) -> None:
        self.cores = frozenset(range(num_cores))
        self.clock = Clock()
        self.path = path
        self._stack = stack

    def join(self, num_own: int = 1, *, borrows: bool = True) -> CoreShare:
        """One more."""
        share = CoreShare(self.path, usable=sorted(self.cores), num_own=num_own, borrows=borrows, clock_ns=self.clock)
        self._stack.callback(share.close)
        return share


@contextmanager
def host_of(num_cores: int) -> Iterator[Host]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        yield Host(Path(folder, "private", "cores"), num_cores, stack)


@pytest.fixture
def host() -> Iterator[Host]:
    with host_of(2) as made:
        yield made


def test_an_idle_workers_core_is_borrowed_and_given_back_at_the_next_step(host: Host) -> None:
    one, other = host.join(), host.join()
    assert (one.own, other.own) == ({0}, {1})

    other.begin_step()
    assert one.begin_step() == {0}
    other.rest()
    host.clock.now_ns += LEND_AFTER_NS - 1
    assert one.begin_step() == {0}, "it was computing a moment ago"
    host.clock.now_ns += 1
    assert one.begin_step() == {0, 1}
    assert other.begin_step() == {1}, "its own core is always its own"
    assert one.look() == {0}


def test_a_team_borrows_after_a_longer_rest() -> None:
    with host_of(4) as host:
        one, other = host.join(2), host.join(2)
        other.begin_step()
        other.rest()
        host.clock.now_ns += TEAM_LEND_AFTER_NS - 1
        assert one.begin_step() == one.own
        host.clock.now_ns += 1
        assert one.begin_step() == host.cores


def test_who_does_not_borrow_lends(host: Host) -> None:
    one, other = host.join(), host.join(borrows=False)
    host.clock.now_ns += LEND_AFTER_NS

    assert other.begin_step() == {1}
    other.rest()
    host.clock.now_ns += LEND_AFTER_NS
    assert one.begin_step() == {0, 1}


def test_a_worker_that_left_leaves_its_cores(host: Host) -> None:
    one, other = host.join(), host.join()
    other.begin_step()
    assert one.begin_step() == {0}
    other.close()
    assert one.begin_step() == {0, 1}
    assert host.join().own == {1}


def test_cores_that_two_own_are_left_for_ones_that_become_free(host: Host) -> None:
    old, staying, new = host.join(), host.join(), host.join()
    assert new.own == old.own, "a replacement comes before the one that it replaces goes"
    old.close()
    assert (staying.begin_step(), new.begin_step()) == ({1}, {0})

    third = host.join()
    staying.close()
    third.begin_step()
    new.begin_step()
    assert {*third.own, *new.own} == {0, 1}


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, list[tuple[int, bool]], list[tuple[int, str]]]:
    """Cores, workers with their numbers of cores that fit, and what the workers do."""
    num_cores = draw(st.integers(2, 8))
    workers: list[tuple[int, bool]] = []
    while (room := num_cores - sum(count for count, _ in workers)) and (not workers or draw(st.booleans())):
        workers.append((draw(st.integers(1, room)), draw(st.sampled_from([True, True, False]))))
    turn = st.tuples(st.integers(0, len(workers) - 1), st.sampled_from(["step", "look", "rest", "wait"]))
    return num_cores, workers, draw(st.lists(turn, max_size=30))


@given(worlds())
def test_no_core_has_two_threads_and_none_is_idle_once_all_have_passed_a_step(
    world: tuple[int, list[tuple[int, bool]], list[tuple[int, str]]],
) -> None:
    num_cores, workers, turns = world
    with host_of(num_cores) as host:
        shares = [host.join(count, borrows=borrows) for count, borrows in workers]
        computing: set[int] = set()
        for number, what in turns:
            share = shares[number]
            if what == "wait":
                host.clock.now_ns += TEAM_LEND_AFTER_NS
            elif what == "rest":
                share.rest()
                computing.discard(number)
            elif what == "step" or number in computing:
                assert (share.begin_step() if what == "step" else share.look()) >= share.own
                computing.add(number)
        host.clock.now_ns += TEAM_LEND_AFTER_NS

        def step_all() -> dict[int, frozenset[int]]:
            return {number: shares[number].begin_step() for number in sorted(computing)}

        used = step_all()
        assert sum(map(len, used.values())) == len(frozenset[int]().union(*used.values())) <= num_cores
        used = step_all()
        assert sum(map(len, used.values())) == len(frozenset[int]().union(*used.values()))
        takers = {number for number in computing if workers[number][1]}
        if takers:
            busy = {core for number in computing - takers for core in shares[number].own}
            assert frozenset[int]().union(*(used[number] for number in takers)) == host.cores - busy
            assert step_all() == used


@given(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.integers(0, 9))
def test_idle_cores_are_divided_so_that_nobody_stays_behind(counts: Sequence[int], num_idle: int) -> None:
    usable = frozenset(range(sum(counts) + num_idle))
    first = [sum(counts[:number]) for number in range(len(counts))]
    owners = {
        number: Owner(cores=frozenset(range(first[number], first[number] + count)), usable=usable, borrows=True)
        for number, count in enumerate(counts)
    }

    lent = divide_idle(owners)

    totals = {number: counts[number] + len(cores) for number, cores in lent.items()}
    assert sum(totals.values()) == len(usable)
    lowest = min(totals.values())
    assert all(total <= lowest + 1 for number, total in totals.items() if lent[number])


def test_own_cores_are_those_that_the_fewest_others_own() -> None:
    assert choose_own([], range(4), 2) == {0, 1}
    assert choose_own([frozenset({0}), frozenset({1})], range(4), 2) == {2, 3}
    assert choose_own([frozenset({0, 1}), frozenset({1})], range(2), 1) == {0}
    assert choose_own([], range(2), 3) == {0, 1}


# ---- processes

WORKER = """
import sys
from pathlib import Path
from engine.device.core_share import CoreShare

share = CoreShare(Path(sys.argv[1]), usable=[0, 1], num_own=1, borrows=True)
print("joined", flush=True)
for line in sys.stdin:
    what = line.strip()
    if what == "step":
        print(*sorted(share.begin_step()), flush=True)
    elif what == "rest":
        share.rest()
        print("rests", flush=True)
share.close()
"""


MAX_LOOKS = 100_000
"""Seconds of them: a core is lent after a millisecond."""


class Worker:
    """A worker in a process of its own."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._pipes[1].readline() == "joined\n"

    def ask(self, what: str) -> str:
        """The answer of the process."""
        asked, told = self._pipes
        asked.write(f"{what}\n")
        asked.flush()
        return told.readline().strip()

    def leave(self) -> None:
        """Let it go, and wait."""
        self._pipes[0].close()
        assert self.process.wait(60) == 0

    def kill(self) -> None:
        """Kill the process as a machine without memory would."""
        self.process.kill()
        self.process.wait(60)

    @property
    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        return self.process.stdin, self.process.stdout


def test_a_process_that_is_killed_in_a_step_gives_its_cores_back(host: Host) -> None:
    worker = Worker(host.path)
    try:
        assert worker.ask("step") == "0 1", "nobody else is there"
        one = host.join()
        host.clock.now_ns = time.monotonic_ns()
        assert (one.own, one.begin_step()) == ({1}, {1})
        host.clock.now_ns += 2 * DOUBT_AFTER_NS
        assert one.begin_step() == {1}, "a long step is no death"
    finally:
        worker.kill()
    host.clock.now_ns += DOUBT_AFTER_NS
    assert one.begin_step() == {0, 1}

    assert host.join().own == {0}, "its slot is cleared for the next"


def test_processes_borrow_from_each_other_and_the_last_one_removes_the_file(host: Host) -> None:
    one, other = Worker(host.path), Worker(host.path)
    try:
        one.ask("step")  # on both cores, if the other has been idle long enough by now
        own = {other.ask("step"), one.ask("step")}
        assert own == {"0", "1"}, "both compute"
        other.ask("rest")
        assert any(one.ask("step") == "0 1" for _ in range(MAX_LOOKS))
        assert other.ask("step") in own
        assert one.ask("step") in own
        other.leave()
        assert host.path.exists()
        one.leave()
        assert not host.path.exists()
    finally:
        one.kill()
        other.kill()


# ---- the file


def test_file_and_folder_are_this_users_alone(tmp_path: Path) -> None:
    path = table_path("mine", tmp_path)
    share = CoreShare(path, usable=[0], num_own=1, borrows=True)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)

    remove_left_over(tmp_path)
    assert path.exists(), "somebody lives there"
    share.close()
    share.close()
    assert not path.exists()


def test_what_killed_workers_left_is_removed(tmp_path: Path) -> None:
    path = table_path("mine", tmp_path)
    worker = Worker(path)
    worker.ask("step")
    worker.kill()
    assert path.exists()

    remove_left_over(tmp_path)
    assert not path.parent.exists()
    remove_left_over(tmp_path)


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    path = table_path("mine", tmp_path)
    path.parent.mkdir(mode=0o755)
    path.parent.chmod(0o755)
    with pytest.raises(CoreTableError, match="not a folder that only this user can access: remove it"):
        CoreShare(path, usable=[0], num_own=1, borrows=True)


def test_a_file_of_another_layout_is_refused(tmp_path: Path) -> None:
    path = table_path("mine", tmp_path)
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"x" * core_table.SIZE)
    with pytest.raises(CoreTableError, match="does not have the layout of version 1: remove it"):
        CoreShare(path, usable=[0], num_own=1, borrows=True)


def test_more_workers_than_slots_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_table, "MAX_WORKERS", 2)
    path = table_path("mine", tmp_path)
    with ExitStack() as stack:
        for _ in range(2):
            stack.callback(CoreShare(path, usable=[0], num_own=1, borrows=True).close)
        with pytest.raises(CoreTableError, match="all 2 slots of"):
            CoreShare(path, usable=[0], num_own=1, borrows=True)


@pytest.mark.parametrize("usable", [[], [0, 1024]])
def test_cores_that_nobody_can_tell_are_refused(usable: list[int], tmp_path: Path) -> None:
    with pytest.raises(CoreTableError, match="are unknown or have numbers above 1023"):
        CoreShare(table_path("mine", tmp_path), usable=usable, num_own=1, borrows=True)
    assert os.listdir(tmp_path) == []


def test_a_system_without_shared_memory_is_told(tmp_path: Path) -> None:
    with pytest.raises(CoreTableError, match="cannot be shared"):
        CoreShare(table_path("mine", tmp_path / "missing"), usable=[0], num_own=1, borrows=True)
    assert os.listdir(tmp_path) == []
