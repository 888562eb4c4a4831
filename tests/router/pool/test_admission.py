"""The queue for memory on decode replicas: its order, its limit, and that no request is lost."""

from __future__ import annotations

import asyncio
import dataclasses
import gc

import pytest

from engine.contract.messages import LoadReport
from router.errors import NoReplicaError, QueueFullError
from router.pool.admission import Admission, RoomWish, Ticket
from router.pool.demand import Demand
from router.pool.pool import ReplicaPool
from router.pool.replica import Reservation
from router.roles import ROLES
from tests.support.engine.requests import greedy_request
from tests.support.router.fake_workers import FakePrefillPool
from tests.support.router.router_rig import FAST, until

REQUEST = greedy_request("a", [1, 2, 3], max_tokens=4)
DEMAND = Demand(REQUEST)


def wish(num_blocks: int, *, priority: int = 0, owner: str = "") -> RoomWish:
    demand = Demand(REQUEST, owner=owner)
    return RoomWish(demand=demand, num_blocks=num_blocks, num_own_blocks=1, priority=priority)


def num_tickets() -> int:
    """The number of tickets that are still referenced."""
    gc.collect()
    return sum(type(item) is Ticket for item in gc.get_objects())


class Bench:
    """One replica of 100 blocks, with as many free as the test says."""

    def __init__(self, *, max_num_queued: int = 10, recovery_wait_s: float = 5.0) -> None:
        self.workers = FakePrefillPool(1)
        settings = dataclasses.replace(
            FAST,
            max_num_queued=max_num_queued,
            report_period_s=30.0,
            unresponsive_after_s=60.0,
            stream_silence_timeout_s=60.0,
            recovery_wait_s=recovery_wait_s,
        )
        self.pool = ReplicaPool(ROLES["decode"], self.workers, policy="kv_usage", settings=settings)
        self.admission = Admission(self.pool, settings=settings)

    def report(self, *, free: int, is_draining: bool = False) -> None:
        load = LoadReport(num_blocks=100, num_free_blocks=free, num_running=1, is_draining=is_draining)
        self.pool.note_load("prefill-0", load)

    async def reserve(self, num_blocks: int, *, priority: int = 0, owner: str = "") -> Reservation:
        [[ticket]] = self.admission.enter([wish(num_blocks, priority=priority, owner=owner)])
        return await self.admission.room(ticket)

    def ask(self, num_blocks: int, *, priority: int = 0, owner: str = "") -> asyncio.Task[Reservation]:
        return asyncio.create_task(self.reserve(num_blocks, priority=priority, owner=owner))


@pytest.fixture
async def bench() -> Bench:
    bench = Bench()
    await asyncio.gather(*bench.pool.refresh())
    bench.report(free=10)
    return bench


async def test_room_is_granted_at_once_where_there_is_some(bench: Bench) -> None:
    reservation = await bench.reserve(10)

    assert reservation.replica.replica_id == "prefill-0"
    assert bench.admission.num_waiting == 0


async def test_request_waits_until_a_report_shows_room(bench: Bench) -> None:
    waiting = bench.ask(20)
    await until(lambda: bench.admission.num_waiting == 1)

    bench.report(free=20)

    assert (await waiting).num_blocks == 20


async def test_released_reservation_lets_the_next_one_in(bench: Bench) -> None:
    first = await bench.reserve(10)
    waiting = bench.ask(10)
    await until(lambda: bench.admission.num_waiting == 1)

    first.release()

    assert (await waiting).num_blocks == 10


async def test_small_request_does_not_overtake_a_large_one(bench: Bench) -> None:
    large = bench.ask(50)
    await until(lambda: bench.admission.num_waiting == 1)
    small = bench.ask(1)
    await until(lambda: bench.admission.num_waiting == 2)
    bench.report(free=40)
    await asyncio.sleep(0)
    assert not small.done()

    bench.report(free=51)

    assert [(await task).num_blocks for task in (large, small)] == [50, 1]


async def test_lower_priority_value_goes_first(bench: Bench) -> None:
    late, urgent = bench.ask(20, priority=5), bench.ask(30, priority=-5)
    await until(lambda: bench.admission.num_waiting == 2)

    bench.report(free=30)

    assert (await urgent).num_blocks == 30
    assert not late.done()
    late.cancel()


async def test_choices_of_a_prompt_take_room_beside_the_first(bench: Bench) -> None:
    wish = RoomWish(demand=DEMAND, num_blocks=5, num_own_blocks=2, priority=0, num_choices=4)
    [tickets] = bench.admission.enter([wish])

    assert [ticket.reservation and ticket.reservation.num_blocks for ticket in tickets] == [5, 2, 2, None]


async def test_choice_that_found_no_room_at_the_door_waits_in_the_order_of_its_arrival(bench: Bench) -> None:
    wish = RoomWish(demand=DEMAND, num_blocks=10, num_own_blocks=10, priority=0, num_choices=2)
    [[_, second]] = bench.admission.enter([wish])
    later = bench.ask(10)
    await until(lambda: bench.admission.num_waiting == 1)
    choice = asyncio.create_task(bench.admission.room(second))
    await until(lambda: bench.admission.num_waiting == 2)
    bench.report(free=20)

    assert (await choice).num_blocks == 10
    assert not later.done()
    later.cancel()


async def test_choice_whose_turn_comes_goes_beside_the_first_before_it_waits(bench: Bench) -> None:
    wish = RoomWish(demand=DEMAND, num_blocks=10, num_own_blocks=2, priority=0, num_choices=2)
    [[first, second]] = bench.admission.enter([wish])
    assert second.reservation is None
    bench.report(free=12)
    assert first.reservation is not None

    assert (await bench.admission.room(second, beside=first.reservation.replica)).num_blocks == 2


async def test_choices_that_do_not_all_find_a_place_leave_nothing_behind() -> None:
    bench = Bench(max_num_queued=1)
    await asyncio.gather(*bench.pool.refresh())
    bench.report(free=10)
    wish = RoomWish(demand=DEMAND, num_blocks=10, num_own_blocks=10, priority=0, num_choices=3)

    with pytest.raises(QueueFullError, match="2 of 3 choices"):
        bench.admission.enter([wish])

    assert (bench.pool.replicas[0].num_reserved, bench.admission.num_waiting) == (0, 0)
    assert (await bench.reserve(10)).num_blocks == 10


async def test_places_of_those_that_left_are_free_again() -> None:
    bench = Bench(max_num_queued=1)
    await asyncio.gather(*bench.pool.refresh())
    bench.report(free=0)
    [[waiting]] = bench.admission.enter([RoomWish(demand=DEMAND, num_blocks=5, num_own_blocks=1, priority=0)])
    bench.admission.leave(waiting)

    again = bench.ask(5)
    await until(lambda: bench.admission.num_waiting == 1)
    again.cancel()


async def test_full_queue_refuses(bench: Bench) -> None:
    bench = Bench(max_num_queued=1)
    await asyncio.gather(*bench.pool.refresh())
    bench.report(free=0)
    waiting = bench.ask(5)
    await until(lambda: bench.admission.num_waiting == 1)

    with pytest.raises(QueueFullError, match="1") as caught:
        await bench.reserve(5)

    assert caught.value.retry_after_s is not None
    waiting.cancel()


async def test_request_that_is_given_up_while_waiting_leaves_no_trace(bench: Bench) -> None:
    given_up, kept = bench.ask(50), bench.ask(20)
    await until(lambda: bench.admission.num_waiting == 2)
    given_up.cancel()

    bench.report(free=20)

    assert (await kept).num_blocks == 20
    assert bench.pool.replicas[0].num_reserved == 1


async def test_room_granted_to_a_request_that_was_given_up_at_that_moment_is_returned(bench: Bench) -> None:
    waiting = bench.ask(50)
    await until(lambda: bench.admission.num_waiting == 1)
    bench.report(free=60)
    replica = bench.pool.replicas[0]
    while replica.num_reserved == 0:  # noqa: ASYNC110 (exactly until the grant, and not one turn longer)
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)

    assert waiting.cancelled()
    assert replica.num_reserved == 0


async def test_nobody_waits_where_no_replica_is_healthy(bench: Bench) -> None:
    bench.pool.note_failure("prefill-0", "test")

    with pytest.raises(NoReplicaError):
        await bench.reserve(1)


@pytest.mark.parametrize("is_gone", [True, False])
async def test_those_who_wait_are_told_when_no_replica_comes_back(is_gone: bool) -> None:
    bench = Bench(recovery_wait_s=0.01)
    await asyncio.gather(*bench.pool.refresh())
    bench.report(free=10)
    waiting = [bench.ask(20), bench.ask(30)]
    await until(lambda: bench.admission.num_waiting == 2)

    if is_gone:
        bench.workers.hidden.add("prefill-0")
        bench.pool.refresh()
    else:
        bench.pool.note_failure("prefill-0", "test")

    for task in waiting:
        with pytest.raises(NoReplicaError, match=r"none came back within 0\.01 s") as caught:
            await asyncio.wait_for(task, timeout=60)
        assert caught.value.retry_after_s is not None
    assert bench.admission.num_waiting == 0


async def test_those_who_wait_go_on_when_a_replica_comes_back(bench: Bench) -> None:
    waiting = bench.ask(20)
    await until(lambda: bench.admission.num_waiting == 1)
    bench.workers.hidden.add("prefill-0")
    bench.pool.refresh()
    await asyncio.sleep(0)
    assert not waiting.done()

    bench.workers.hidden.clear()
    await asyncio.gather(*bench.pool.refresh())

    assert (await asyncio.wait_for(waiting, timeout=60)).num_blocks == 20


async def test_request_waits_for_a_replica_that_has_just_come_when_the_last_one_goes(bench: Bench) -> None:
    bench.report(free=10, is_draining=True)
    with pytest.raises(NoReplicaError):
        await bench.reserve(1)
    bench.workers.add("prefill-1")

    early = bench.ask(1)
    await until(lambda: bench.admission.num_waiting == 1)
    questions = bench.pool.refresh()
    late = bench.ask(1)
    await asyncio.gather(*questions)

    assert {(await asked).replica.replica_id for asked in (early, late)} == {"prefill-1"}


async def test_those_who_leave_behind_one_that_waits_leave_nothing_behind(bench: Bench) -> None:
    """Their entries stayed until the first one had room, each with its prompt."""
    first = bench.ask(50)
    await until(lambda: bench.admission.num_waiting == 1)
    num_before = num_tickets()

    for _ in range(2000):
        for ticket in bench.admission.enter([wish(1)] * 4):
            bench.admission.leave(ticket[0])

    assert bench.admission.num_waiting == 1
    assert num_tickets() - num_before < 200
    bench.report(free=51)
    assert (await first).num_blocks == 50


async def test_order_is_kept_when_most_of_the_queue_has_left(bench: Bench) -> None:
    waiting = [bench.ask(20, priority=priority) for priority in (3, 1, 2)]
    await until(lambda: bench.admission.num_waiting == 3)
    for _ in range(200):
        bench.admission.leave(bench.admission.enter([wish(1, priority=-1)])[0][0])
    order: list[int] = []
    for number, task in enumerate(waiting):
        task.add_done_callback(lambda _, number=number: order.append(number))

    for free in (20, 40, 60):
        bench.report(free=free)
        await until(lambda number=free // 20: len(order) == number)

    assert order == [1, 2, 0]
    assert bench.admission.num_waiting == 0


async def test_one_keys_many_requests_keep_another_keys_waiting_no_longer_than_one_of_them(bench: Bench) -> None:
    """They were served in the order of arrival, whosever they were."""
    flood = [bench.ask(10, owner="flood") for _ in range(8)]
    await until(lambda: bench.admission.num_waiting == 7)

    other = bench.ask(10, owner="other")
    await until(lambda: bench.admission.num_waiting == 8)
    for task in flood[:2]:
        (await task).release()

    assert (await other).num_blocks == 10
    assert sum(task.done() for task in flood) <= 3
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
