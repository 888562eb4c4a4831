"""What the router knows of its replicas: reports, reservations, failures, probes, and age."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from engine.contract.messages import LoadReport
from router.attentive_clock import AttentiveClock
from router.errors import NoReplicaError
from router.pool.demand import Demand
from router.pool.pool import STALLED, ReplicaPool
from router.roles import ROLES
from router.settings import RouterSettings
from tests.support.clock import ManualClock
from tests.support.engine.requests import greedy_request
from tests.support.router.fake_workers import FakePrefillPool
from tests.support.router.router_rig import FAST

DEMAND = Demand(greedy_request("a", [1, 2, 3], max_tokens=4))


class Bench:
    """A pool over fake workers, on a clock of its own."""

    def __init__(self, num_replicas: int = 2, *, policy: str = "kv_usage", settings: RouterSettings = FAST) -> None:
        self.workers = FakePrefillPool(num_replicas)
        self.clock = ManualClock()
        self.pool = ReplicaPool(ROLES["prefill"], self.workers, policy=policy, settings=settings, clock=self.clock)
        self.lost: list[str] = []
        self.pool.on_lost = lambda error: self.lost.append(error.reason)

    async def refresh(self) -> None:
        await asyncio.gather(*self.pool.refresh())

    def report(self, replica_id: str, *, free: int, total: int = 100, running: int = 1) -> None:
        load = LoadReport(num_blocks=total, num_free_blocks=free, num_running=running)
        self.pool.note_load(replica_id, load)

    def chosen(self, **arguments: object) -> str | None:
        replica = self.pool.choose(DEMAND, **arguments)  # type: ignore[arg-type]
        return None if replica is None else replica.replica_id


@pytest.fixture
async def bench() -> Bench:
    bench = Bench()
    await bench.refresh()
    return bench


async def test_replica_takes_requests_once_it_introduced_itself() -> None:
    bench = Bench()
    assert bench.chosen() is None

    await bench.refresh()

    assert bench.chosen() == "prefill-0"
    assert bench.pool.has_introduced()


async def test_replica_whose_stream_has_not_begun_waits_for_requests_until_it_has(bench: Bench) -> None:
    bench.report("prefill-1", free=1)
    assert bench.chosen() == "prefill-1"
    assert bench.chosen(exclude=["prefill-1"]) == "prefill-0"

    bench.pool.note_stream_end("prefill-1")
    assert bench.chosen() == "prefill-0"


async def test_replica_that_leaves_is_forgotten(bench: Bench) -> None:
    bench.workers.hidden.add("prefill-0")
    await bench.refresh()

    assert [replica.replica_id for replica in bench.pool.replicas] == ["prefill-1"]


async def test_usage_of_replicas_of_different_size_is_balanced(bench: Bench) -> None:
    bench.report("prefill-0", free=50, total=100)
    bench.report("prefill-1", free=90, total=200)

    assert bench.chosen() == "prefill-0"


async def test_reservation_counts_until_it_is_released_once(bench: Bench) -> None:
    bench.report("prefill-0", free=60)
    bench.report("prefill-1", free=50)
    first = bench.pool.choose(DEMAND)
    assert first is not None
    reservation = bench.pool.reserve(first, num_blocks=20)

    during = bench.chosen()
    reservation.release()
    reservation.release()

    assert (during, bench.chosen()) == ("prefill-1", "prefill-0")
    assert (first.reserved_blocks, first.num_reserved) == (0, 0)


async def test_room_is_asked_of_reports_less_reservations(bench: Bench) -> None:
    for name in ("prefill-0", "prefill-1"):
        bench.report(name, free=10)
    replica = bench.pool.choose(DEMAND)
    assert replica is not None
    bench.pool.reserve(replica, num_blocks=5)

    assert bench.chosen(num_blocks=10, must_fit=True) == "prefill-1"
    assert bench.chosen(num_blocks=11, must_fit=True) is None


async def test_idle_replica_takes_even_what_does_not_seem_to_fit(bench: Bench) -> None:
    bench.report("prefill-0", free=10, running=0)
    bench.report("prefill-1", free=10)

    assert bench.chosen(num_blocks=50, must_fit=True) == "prefill-0"


async def test_stale_report_is_trusted_less_but_better_than_nothing(bench: Bench) -> None:
    bench.report("prefill-0", free=90)
    bench.clock.advance(FAST.stale_after_s + 0.1)
    bench.report("prefill-1", free=10)
    assert bench.chosen() == "prefill-1"

    bench.clock.advance(FAST.stale_after_s + 0.1)
    assert bench.chosen() == "prefill-0"


async def test_failing_replica_is_left_out_until_a_probe_succeeds(bench: Bench) -> None:
    bench.pool.note_failure("prefill-0", "test")
    assert bench.chosen() == "prefill-1"

    await bench.refresh()
    still_out = bench.pool.get("prefill-0")
    assert still_out is not None
    assert still_out.is_left_out

    bench.clock.advance(FAST.backoff_min_s)
    await bench.refresh()
    assert not still_out.is_left_out


async def test_probes_of_a_dead_replica_come_ever_more_seldom(bench: Bench) -> None:
    bench.workers[0].is_dead = True
    replica = bench.pool.get("prefill-0")
    assert replica is not None
    waits: list[float] = []
    for _ in range(4):
        bench.pool.note_failure("prefill-0", "test")
        waits.append(round(replica.probe_at_s - bench.clock(), 6))
        bench.clock.advance(waits[-1])

    assert waits == [0.02, 0.04, 0.08, 0.1]


async def test_fault_that_many_requests_tell_of_leaves_a_replica_out_once() -> None:
    bench = Bench(1, settings=RouterSettings())
    await bench.refresh()
    replica = bench.pool.get("prefill-0")
    assert replica is not None
    for _ in range(8):
        bench.pool.note_failure("prefill-0", "test")

    assert replica.probe_at_s - bench.clock() == 0.5


async def test_replica_that_refused_because_it_is_drained_is_not_chosen_again(bench: Bench) -> None:
    bench.pool.note_draining("prefill-0")
    assert bench.chosen() == "prefill-1"

    bench.pool.note_draining("prefill-1")
    assert bench.chosen() is None


async def test_quiet_replica_is_asked_and_a_reporting_one_is_not(bench: Bench) -> None:
    bench.clock.advance(2 * FAST.report_period_s)
    bench.report("prefill-0", free=1)

    assert len(bench.pool.refresh()) == 1


async def test_request_waits_for_a_replica_to_come_back(bench: Bench) -> None:
    for name in ("prefill-0", "prefill-1"):
        bench.pool.note_failure(name, "test")
    waiting = asyncio.create_task(bench.pool.choose_or_wait(DEMAND, {"prefill-0"}))
    await asyncio.sleep(0)
    assert not waiting.done()

    bench.clock.advance(1.0)
    await bench.refresh()

    assert (await waiting).replica_id == "prefill-1"


async def test_wait_for_a_replica_is_bounded() -> None:
    bench = Bench(settings=dataclasses.replace(FAST, recovery_wait_s=0.01))
    await bench.refresh()
    for name in ("prefill-0", "prefill-1"):
        bench.pool.note_failure(name, "test")

    with pytest.raises(NoReplicaError, match=r"none came back within 0\.01 s") as caught:
        await bench.pool.choose_or_wait(DEMAND)

    assert caught.value.retry_after_s == FAST.retry_after_s


async def test_untried_replica_is_preferred(bench: Bench) -> None:
    bench.report("prefill-0", free=90)
    bench.report("prefill-1", free=10)

    assert (await bench.pool.choose_or_wait(DEMAND, {"prefill-0"})).replica_id == "prefill-1"


@pytest.mark.known_failure(23)
async def test_replica_that_answers_nothing_is_given_up_at_its_age_and_not_later(bench: Bench) -> None:
    bench.workers[0].status_gate.clear()
    replica = bench.pool.get("prefill-0")
    assert replica is not None
    bench.clock.advance(FAST.unresponsive_after_s - 0.01)
    bench.pool.refresh()
    assert bench.lost == []

    bench.clock.advance(0.01)
    bench.report("prefill-1", free=1)
    bench.pool.refresh()
    assert bench.lost == ["silent for 5.0 s"]

    assert replica.is_left_out
    await bench.pool.close()


@pytest.mark.known_failure(23)
async def test_replica_whose_engine_hangs_is_lost_though_it_answers(bench: Bench) -> None:
    bench.workers[0].is_stalled = True
    replica = bench.pool.get("prefill-0")
    assert replica is not None
    bench.clock.advance(2 * FAST.report_period_s)
    await bench.refresh()
    assert bench.lost == [STALLED]

    bench.clock.advance(FAST.backoff_max_s)
    await bench.refresh()
    assert replica.is_left_out

    bench.workers[0].is_stalled = False
    bench.clock.advance(FAST.backoff_max_s)
    await bench.refresh()
    assert not replica.is_left_out


def test_time_without_attention_does_not_count() -> None:
    world = ManualClock()
    clock = AttentiveClock(max_gap_s=0.5, clock=world)
    for _ in range(4):
        world.advance(0.25)
        clock.tick()
    assert clock() == 1.0

    world.advance(60.0)
    assert clock() == 1.5
    clock.tick()
    world.advance(0.25)

    assert clock() == 1.75


_EVENTS = st.one_of(
    st.tuples(st.just("report"), st.integers(0, 2), st.integers(0, 100)),
    st.tuples(st.just("drain"), st.integers(0, 2), st.integers(0, 100)),
    st.tuples(st.just("fail"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("silence"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("pass"), st.just(0), st.integers(1, 100)),
    st.tuples(st.just("refresh"), st.just(0), st.just(0)),
)


@given(events=st.lists(_EVENTS, max_size=25))
@examples(max_examples=60)
def test_whatever_happened_the_choice_is_among_those_with_reports_and_a_stream(
    events: list[tuple[str, int, int]],
) -> None:
    bench = Bench(3)
    stale_s = FAST.stale_after_s

    async def live() -> None:
        await bench.refresh()
        for kind, index, value in events:
            replica_id = f"prefill-{index}"
            if kind in ("report", "drain"):
                load = LoadReport(num_blocks=100, num_free_blocks=value, num_running=1, is_draining=kind == "drain")
                bench.pool.note_load(replica_id, load)
            elif kind == "fail":
                bench.pool.note_failure(replica_id, "the test says so")
            elif kind == "silence":
                bench.pool.note_stream_end(replica_id)
            elif kind == "pass":
                bench.clock.advance(stale_s * (value + 0.37) / 40)  # never to the very moment, which rounding decides
            else:
                await bench.refresh()
            serving = [item for item in bench.pool.replicas if item.takes_requests]
            fresh = [item for item in serving if bench.clock() - item.reported_at_s <= stale_s]
            heard = [item for item in fresh if item.has_stream]
            best = min(heard or fresh or serving, key=lambda item: (item.promised_usage, item.replica_id), default=None)
            assert bench.chosen() == (None if best is None else best.replica_id)

    asyncio.run(live())
