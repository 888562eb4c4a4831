"""Leases end once, whatever the order of grants, renewals, completions, aborts and deadlines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from kv_transfer.connector import LeaseEnd
from kv_transfer.peer.lease import Completion, LeaseTable

TTL_S = 30.0


class ManualClock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _make_table() -> tuple[LeaseTable, ManualClock]:
    clock = ManualClock()
    return LeaseTable(ttl_s=TTL_S, clock=clock), clock


@pytest.mark.known_failure(6)
def test_completion_ends_a_lease_once_and_repeats_its_answer_to_the_same_reader() -> None:
    """A duplicate is counted and has no other effect."""
    table, _ = _make_table()
    lease = table.grant(request_id="request", block_ids=(1, 2))

    answers = [table.complete(lease.lease_id, reader="reader") for _ in range(2)]

    assert answers == [Completion.OK, Completion.OK]
    assert [(ended.lease_id, ended.reason) for ended in table.take_ended()] == [(lease.lease_id, LeaseEnd.DONE)]
    assert table.counts().num_unknown == 1


def test_second_reader_of_a_lease_is_told_that_it_ended() -> None:
    table, _ = _make_table()
    lease = table.grant(request_id="request", block_ids=(1,))
    table.complete(lease.lease_id, reader="first")

    assert table.complete(lease.lease_id, reader="second") is Completion.EXPIRED


def test_completion_at_the_deadline_is_too_late_even_if_nobody_looked() -> None:
    table, clock = _make_table()
    lease = table.grant(request_id="request", block_ids=(1,))
    clock.now_s = TTL_S

    assert table.complete(lease.lease_id, reader="reader") is Completion.EXPIRED
    assert [ended.reason for ended in table.take_ended()] == [LeaseEnd.EXPIRED]


@pytest.mark.known_failure(2)
def test_expired_leases_behind_a_renewed_one_are_found() -> None:
    """The whole table is looked at, not only up to the first live lease."""
    table, clock = _make_table()
    first = table.grant(request_id="first", block_ids=(1,))
    second = table.grant(request_id="second", block_ids=(2,))
    clock.now_s = TTL_S - 1
    assert table.renew(first.lease_id)
    clock.now_s = TTL_S

    assert table.expire() == 1
    assert [ended.lease_id for ended in table.take_ended()] == [second.lease_id]
    clock.now_s = 2 * TTL_S
    assert table.expire() == 1


def test_renewal_does_not_revive_an_expired_lease() -> None:
    table, clock = _make_table()
    lease = table.grant(request_id="request", block_ids=(1,))
    clock.now_s = TTL_S

    assert not table.renew(lease.lease_id)
    assert table.complete(lease.lease_id, reader="reader") is Completion.EXPIRED


def test_abort_of_a_request_ends_all_its_leases() -> None:
    table, _ = _make_table()
    for request_id in ("retried", "retried", "other"):
        table.grant(request_id=request_id, block_ids=(1,))

    assert table.abort_request("retried") == 2
    assert table.abort_request("retried") == 0
    assert [ended.reason for ended in table.take_ended()] == [LeaseEnd.ABORTED] * 2
    assert table.num_live == 1


def test_owner_is_told_of_grants_and_ends() -> None:
    changes: list[None] = []
    table = LeaseTable(ttl_s=TTL_S, clock=ManualClock(), on_change=lambda: changes.append(None))
    lease = table.grant(request_id="request", block_ids=(1,))
    assert len(changes) == 1

    table.abort(lease.lease_id)

    assert len(changes) == 2


class _TakenAway:
    """A callback that another thread removes right after it was seen."""

    _callback: Callable[[], None] | None = None

    def __get__(self, _owner: object, _kind: type) -> Callable[[], None] | None:
        callback, self._callback = self._callback, None
        return callback

    def __set__(self, _owner: object, callback: Callable[[], None] | None) -> None:
        self._callback = callback


def test_owner_may_go_while_it_is_told() -> None:
    """A connector's thread that dies must not take the engine's along."""

    class Table(LeaseTable):
        on_change = _TakenAway()  # type: ignore[assignment]

    changes: list[None] = []
    table = Table(ttl_s=TTL_S, clock=ManualClock(), on_change=lambda: changes.append(None))

    table.grant(request_id="request", block_ids=(1,))

    assert len(changes) == 1


class LeaseMachine(RuleBasedStateMachine):
    """Against a model: a lease is alive until its deadline, and how it ended is decided once."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.table, self.clock = _make_table()
        self.deadlines: dict[str, float] = {}
        self.ends: dict[str, LeaseEnd] = {}
        self.readers: dict[str, str] = {}
        self.requests: dict[str, str] = {}
        self.reported: list[tuple[str, LeaseEnd]] = []

    def _is_alive(self, lease_id: str) -> bool:
        if lease_id not in self.ends and self.clock.now_s >= self.deadlines[lease_id]:
            self.ends[lease_id] = LeaseEnd.EXPIRED
        return lease_id not in self.ends

    @rule(target=leases, request=st.sampled_from("abc"))
    def grant(self, request: str) -> str:
        lease = self.table.grant(request_id=request, block_ids=(1,))
        self.deadlines[lease.lease_id] = self.clock.now_s + TTL_S
        self.requests[lease.lease_id] = request
        return lease.lease_id

    @rule(lease_id=leases)
    def renew(self, lease_id: str) -> None:
        is_alive = self._is_alive(lease_id)
        assert self.table.renew(lease_id) == is_alive
        if is_alive:
            self.deadlines[lease_id] = self.clock.now_s + TTL_S

    @rule(lease_id=leases, reader=st.sampled_from("xy"))
    def complete(self, lease_id: str, reader: str) -> None:
        is_alive = self._is_alive(lease_id)
        if is_alive:
            self.ends[lease_id] = LeaseEnd.DONE
            self.readers[lease_id] = reader
        is_ok = self.readers.get(lease_id) == reader
        assert self.table.complete(lease_id, reader=reader) is (Completion.OK if is_ok else Completion.EXPIRED)

    @rule(lease_id=leases)
    def abort(self, lease_id: str) -> None:
        is_alive = self._is_alive(lease_id)
        if is_alive:
            self.ends[lease_id] = LeaseEnd.ABORTED
        assert self.table.abort(lease_id) == is_alive

    @rule(request=st.sampled_from("abc"))
    def abort_request(self, request: str) -> None:
        self.expire()
        for lease_id in [key for key, owner in self.requests.items() if owner == request and self._is_alive(key)]:
            self.ends[lease_id] = LeaseEnd.ABORTED
        self.table.abort_request(request)

    @rule(lease_id=st.text(max_size=3))
    def complete_unknown(self, lease_id: str) -> None:
        assert self.table.complete(lease_id, reader="x") is Completion.EXPIRED

    @rule(seconds=st.sampled_from([0.0, 1.0, 10.0, 29.0, 30.0, 100.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule()
    def expire(self) -> None:
        for lease_id in self.deadlines:
            self._is_alive(lease_id)
        self.table.expire()
        assert self.table.num_live == len(self.deadlines) - len(self.ends)

    @rule()
    def take_ended(self) -> None:
        self.reported += [(ended.lease_id, ended.reason) for ended in self.table.take_ended()]

    @invariant()
    def every_lease_is_counted_once(self) -> None:
        counts = self.table.counts()
        num_ended = counts.num_done + counts.num_expired + counts.num_aborted
        assert counts.num_granted == len(self.deadlines) == num_ended + self.table.num_live
        assert self.table.num_ended == num_ended

    def teardown(self) -> None:
        self.clock.now_s += 1000.0
        self.expire()
        self.take_ended()
        assert Counter(self.reported) == Counter(self.ends.items())


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
