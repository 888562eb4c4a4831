"""The peers that a worker connects to in advance, and how it learns that it is being stopped."""

from __future__ import annotations

import pytest

from cluster.serve.introductions import ABSENT_AFTER_S, FORGET_AFTER_S, TURN_S, Introductions
from engine.contract.messages import LoadReport
from router.pool.workers import WorkerUnavailableError
from tests.support.clock import ManualClock
from tests.support.router.fake_caller import FakeCaller, Method


class Acquaintances:
    """A connector that connects to everyone who answers."""

    def __init__(self) -> None:
        self.ids: frozenset[str] = frozenset()
        self.silent: set[str] = set()
        self.greeted: list[str] = []
        self.forgotten: list[str] = []
        self.max_num = 99

    @property
    def has_room(self) -> bool:
        """Whether it meets another one."""
        return len(self.ids) < self.max_num

    def greet(self, engine_id: str) -> None:
        """Meet it."""
        self.greeted.append(engine_id)
        if engine_id not in self.silent:
            self.ids |= {engine_id}

    def forget(self, engine_id: str) -> None:
        """Take note."""
        self.forgotten.append(engine_id)


class Bench:
    """A decode worker ``m`` among others."""

    def __init__(self) -> None:
        self.decode = FakeCaller({"m": {}})
        self.prefill = FakeCaller()
        self.peers = Acquaintances()
        self.clock = ManualClock()
        self.num_met = 0
        self.num_absences = 0
        self.introductions = Introductions(
            own_id="m",
            own=self.decode,
            others=[self.prefill],
            meets_own_role=True,
            peers=self.peers,
            on_met=self._met,
            on_absent=self._absent,
            clock=self.clock,
        )

    def _met(self, num_met: int) -> None:
        self.num_met = num_met

    def _absent(self) -> None:
        self.num_absences += 1


def answering(load: LoadReport) -> Method:
    async def status() -> object:
        return None, load

    return status


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_newcomer_meets_everybody_before_it_is_ready(bench: Bench) -> None:
    bench.prefill.replicas = {"a": {}, "z": {}}
    bench.decode.replicas = {"b": {}}

    await bench.introductions.meet_all(timeout_s=5)

    assert bench.peers.ids == {"a", "b", "z"}
    assert bench.num_met == 2


async def test_one_that_does_not_answer_holds_nobody_up_for_ever(bench: Bench) -> None:
    bench.prefill.replicas = {"a": {}, "z": {}}
    bench.peers.silent = {"a"}

    await bench.introductions.meet_all(timeout_s=0.2)

    assert bench.peers.ids == {"z"}
    assert bench.num_met == 1


async def test_no_more_are_greeted_than_are_kept(bench: Bench) -> None:
    """Each beyond would have another one forgotten, which would be greeted in turn, for ever."""
    bench.prefill.replicas = {f"z{number}": {} for number in range(9)}
    bench.peers.max_num = 4

    await bench.introductions.meet_all(timeout_s=60)
    num_greeted = len(bench.peers.greeted)
    for _ in range(9):
        bench.clock.advance(TURN_S)
        bench.introductions.look()

    assert len(bench.peers.greeted) == num_greeted
    assert bench.num_met >= 4


async def test_connector_that_fails_holds_nobody_up_and_is_asked_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.prefill.replicas["a"] = {}
    with monkeypatch.context() as patch:
        patch.setattr(bench.peers, "greet", lambda engine_id: 1 // 0)
        await bench.introductions.meet_all(timeout_s=5.0)
    bench.introductions.look()
    bench.clock.advance(TURN_S)
    bench.introductions.look()

    assert bench.peers.ids == {"a"}


def test_of_two_workers_the_one_with_the_smaller_id_begins_at_once_and_the_other_later(bench: Bench) -> None:
    bench.prefill.replicas = {"a": {}, "z": {}}
    bench.introductions.look()
    assert bench.peers.greeted == ["z"]

    bench.clock.advance(TURN_S)
    bench.introductions.look()
    assert bench.peers.greeted == ["z", "a"]

    bench.introductions.look()
    assert bench.num_met == 2


def test_one_that_left_can_be_read_from_for_a_while(bench: Bench) -> None:
    bench.prefill.replicas = {"z": {}}
    bench.introductions.look()
    bench.prefill.replicas = {}
    bench.clock.advance(FORGET_AFTER_S - 1)
    bench.introductions.look()
    assert bench.peers.forgotten == []

    bench.clock.advance(1)
    bench.introductions.look()
    bench.introductions.look()
    assert bench.peers.forgotten == ["z"]


def test_worker_that_is_taken_off_the_list_leaves_once(bench: Bench) -> None:
    bench.introductions.look()
    bench.decode.replicas = {"b": {}}
    bench.introductions.look()
    bench.clock.advance(ABSENT_AFTER_S / 2)
    bench.introductions.look()
    assert bench.num_absences == 0

    bench.clock.advance(ABSENT_AFTER_S / 2)
    bench.introductions.look()
    bench.introductions.look()
    assert bench.num_absences == 1
    assert bench.introductions.siblings() == {"b"}


async def test_only_siblings_that_go_on_can_take_requests_over(bench: Bench) -> None:
    async def gone() -> object:
        raise WorkerUnavailableError(replica_id="d", reason="gone")

    bench.decode.replicas = {
        "m": {},
        "a": {"status": answering(LoadReport())},
        "b": {"status": answering(LoadReport(is_draining=True))},
        "c": {"status": answering(LoadReport(is_stalled=True))},
        "d": {"status": gone},
    }

    assert await bench.introductions.takers() == {"a"}


def test_worker_that_is_not_on_the_list_yet_does_not_leave(bench: Bench) -> None:
    bench.decode.replicas = {}
    bench.introductions.look()
    bench.clock.advance(10 * ABSENT_AFTER_S)
    bench.introductions.look()

    assert bench.num_absences == 0


async def test_worker_that_is_alone_may_leave_at_any_time(bench: Bench) -> None:
    bench.introductions.look()

    assert await bench.introductions.may_leave()


@pytest.mark.parametrize(
    ("sibling", "load", "may_leave"),
    [
        ("a", LoadReport(), True),
        ("a", LoadReport(is_draining=True), False),
        ("a", LoadReport(has_hung_read=True), False),
        ("z", LoadReport(has_hung_read=True), True),
        ("a", LoadReport(is_stalled=True), False),
    ],
)
async def test_one_of_a_pool_leaves_at_a_time_and_while_others_take_requests(
    bench: Bench, sibling: str, load: LoadReport, may_leave: bool
) -> None:
    bench.decode.replicas[sibling] = {"status": answering(load)}
    bench.introductions.look()

    assert await bench.introductions.may_leave() is may_leave


async def test_worker_whose_last_sibling_is_being_replaced_waits(bench: Bench) -> None:
    bench.decode.replicas["a"] = {"status": answering(LoadReport(has_hung_read=True))}
    bench.introductions.look()
    del bench.decode.replicas["a"]
    assert not await bench.introductions.may_leave()

    bench.decode.replicas["b"] = {"status": answering(LoadReport())}

    assert await bench.introductions.may_leave()
