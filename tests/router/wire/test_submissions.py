"""Submissions and aborts in flight: joined, answered in order, and without remains of callers that gave up."""

from __future__ import annotations

import asyncio

import pytest

from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.token_ids import TokenIds
from router.pool.workers import WorkerRefusedError, WorkerUnavailableError
from router.wire.aborts import AbortSender
from router.wire.submissions import Submissions
from tests.support.router.router_rig import until
from tests.support.router.slow_pool import SlowPool


def request(name: str) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_token_ids=TokenIds.of((1,)), sampling=SamplingParams(max_tokens=2))


class Bench:
    """Submissions to one slow replica."""

    def __init__(self, *, timeout_s: float = 5.0) -> None:
        self.workers = SlowPool()
        self.aborts = AbortSender(self.workers, timeout_s=5.0)
        self.submissions = Submissions(self.workers, self.aborts, timeout_s=timeout_s)

    def submit(self, name: str) -> asyncio.Future[WorkerRefusedError | None]:
        return self.submissions.submit("decode-0", request(name))


async def test_what_waits_behind_a_call_goes_in_the_next_one() -> None:
    bench = Bench()
    first = bench.submit("a")
    await until(lambda: bench.workers.calls == [["a"]])
    others = [bench.submit(name) for name in "bcd"]
    await asyncio.sleep(0)
    bench.workers.may_enter.set()
    await asyncio.gather(first, *others)

    assert bench.workers.calls == [["a"], ["b", "c", "d"]]


async def test_nothing_waits_behind_a_call_over_a_connection_but_what_comes_at_once_shares_one() -> None:
    bench = Bench()
    bench.workers.is_linked = True
    first = bench.submit("a")
    await until(lambda: bench.workers.calls == [["a"]])
    others = [bench.submit(name) for name in "bcd"]
    await until(lambda: bench.workers.calls == [["a"], ["b", "c", "d"]])
    bench.workers.may_enter.set()

    assert await asyncio.gather(first, *others) == [None] * 4


@pytest.mark.parametrize("is_linked", [False, True])
async def test_late_answer_ends_its_own_run_and_not_the_one_that_was_sent_meanwhile(is_linked: bool) -> None:
    """A replica hung, its request was given up, and came back there, since there was no other one."""
    bench = Bench()
    bench.workers.is_linked = is_linked
    first = bench.submit("a")
    await until(lambda: bench.workers.calls == [["a"]])
    first.cancel()
    second = bench.submit("a~2")
    await asyncio.sleep(0)
    bench.workers.may_enter.set()

    assert await second is None
    await asyncio.sleep(0)
    await bench.aborts.flush()
    assert bench.workers.calls == [["a"], ["a~2"]]
    assert bench.workers[0].aborted == ["a"]


@pytest.mark.parametrize("is_linked", [False, True])
async def test_late_answer_to_a_notice_does_not_end_its_request(is_linked: bool) -> None:
    """A replica hung while the notice was on its way, and the request itself came meanwhile."""
    bench = Bench()
    bench.workers.is_linked = is_linked
    first = bench.submit("a")
    await until(lambda: bench.workers.calls == [["a"]])
    first.cancel()
    second = bench.submit("a")
    await asyncio.sleep(0)
    bench.workers.may_enter.set()

    assert await second is None
    await asyncio.sleep(0)
    await bench.aborts.flush()
    assert bench.workers.calls == [["a"], ["a"]]
    assert bench.workers[0].aborted == []


async def test_late_answer_to_a_notice_ends_it_if_its_request_was_refused() -> None:
    bench = Bench()
    first = bench.submit("a")
    await until(lambda: bench.workers.calls == [["a"]])
    first.cancel()
    second = bench.submit("a")
    await asyncio.sleep(0)
    bench.workers.refused.add("a")
    bench.workers.may_enter.set()

    assert await second is not None
    await asyncio.sleep(0)
    await bench.aborts.flush()
    assert bench.workers[0].aborted == ["a"]


async def test_closing_ends_every_call_under_way() -> None:
    bench = Bench()
    bench.workers.is_linked = True
    first = bench.submit("a")
    await until(lambda: bench.workers.calls == [["a"]])
    second = bench.submit("b")
    await until(lambda: bench.workers.calls == [["a"], ["b"]])

    await bench.submissions.close()

    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not first.done()
    assert not second.done()


async def test_each_caller_gets_its_own_answer() -> None:
    bench = Bench()
    bench.workers.refused = {"b"}
    bench.workers.may_enter.set()
    results = await asyncio.gather(*(bench.submit(name) for name in "abc"), return_exceptions=True)

    assert [type(result) for result in results] == [type(None), WorkerRefusedError, type(None)]


@pytest.mark.parametrize(
    "fault", [WorkerUnavailableError(replica_id="decode-0", reason="gone"), RuntimeError("a bug in the adapter")]
)
async def test_failed_call_fails_all_its_requests_as_unavailable(fault: Exception) -> None:
    bench = Bench()
    bench.workers.fault = fault
    bench.workers.may_enter.set()
    results = await asyncio.gather(*(bench.submit(name) for name in "ab"), return_exceptions=True)

    assert all(isinstance(result, WorkerUnavailableError) for result in results)


async def test_call_that_is_not_answered_in_time_counts_as_unavailable() -> None:
    bench = Bench(timeout_s=0.01)

    with pytest.raises(WorkerUnavailableError, match=r"0\.01 s"):
        await bench.submit("a")


async def test_request_given_up_before_it_was_sent_is_not_sent() -> None:
    bench = Bench()
    first, second = bench.submit("a"), bench.submit("b")
    await until(lambda: bench.workers.calls == [["a", "b"]])
    third = bench.submit("c")
    await asyncio.sleep(0)
    third.cancel()
    await asyncio.sleep(0)
    bench.workers.may_enter.set()
    await asyncio.gather(first, second)

    assert bench.workers.calls == [["a", "b"]]


async def test_request_given_up_while_it_was_sent_is_aborted_afterwards() -> None:
    bench = Bench()
    task = bench.submit("a")
    await until(lambda: bench.workers.calls == [["a"]])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert bench.workers[0].aborted == []

    bench.workers.may_enter.set()

    await until(lambda: bench.workers[0].aborted == ["a"])


async def test_aborts_at_the_same_time_share_a_call() -> None:
    bench = Bench()
    for name in "abcabc":
        bench.aborts.abort("decode-0", name)
    await bench.aborts.flush()

    assert sorted(bench.workers[0].aborted) == ["a", "b", "c"]


async def test_abort_to_a_dead_replica_is_given_up_quietly() -> None:
    bench = Bench()
    bench.workers[0].is_dead = True
    bench.aborts.abort("decode-0", "a")
    await bench.aborts.flush()

    assert bench.workers[0].aborted == []
