"""Queues: C12."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.config import QueuePolicy
from engine.scheduler.policy.preemption import order_key
from engine.scheduler.requests.request import Request
from engine.scheduler.requests.request_queue import MAX_PASSING, make_queue
from kv_transfer.params import PROTOCOL_VERSION, KVTransferParams, PeerIdentity
from tests.support.scheduler.scheduler_requests import make_request

HAND_OVER = KVTransferParams(
    protocol_version=PROTOCOL_VERSION,
    source=PeerIdentity(engine_id="other", incarnation="1"),
    lease_id="lease",
    layout_hash="layout",
    block_ids=((0,),),
    num_tokens=1,
)


def queued(sequence: int, *, priority: int = 0, arrival_s: float = 0.0, brings_kv: bool = False) -> Request:
    """A request as the queue sees it."""
    message = make_request(f"r{sequence}", (1,), priority=priority, arrival_s=arrival_s)
    request = Request(message, arrival_index=sequence, full_limit=9, queued_at_s=0.0)
    request.kv_transfer = HAND_OVER if brings_kv else None
    return request


@pytest.mark.behaviour("C12")
def test_c12_fcfs_serves_in_order_of_arrival_and_the_preempted_first() -> None:
    queue = make_queue("fcfs")
    requests = [queued(index, priority=9 - index) for index in range(4)]
    for request in requests[1:]:
        queue.push(request)
    queue.push_front(requests[0])

    assert [queue.pop() for _ in range(4)] == requests


@pytest.mark.behaviour("C12")
def test_c12_fcfs_lets_what_was_computed_elsewhere_pass_prompts() -> None:
    queue = make_queue("fcfs")
    prompt, first, second = queued(0), queued(1, brings_kv=True), queued(2, brings_kv=True)
    for request in (prompt, first, second):
        queue.push(request)
    second.kv_transfer = None

    assert second in queue
    assert [queue.pop() for _ in range(3)] == [first, second, prompt]


@pytest.mark.behaviour("C12")
@given(arrivals=st.lists(st.integers(0, 6), min_size=40, max_size=120), num_prompts=st.integers(1, 4))
@settings(derandomize=True, deadline=None, max_examples=100)
def test_c12_fcfs_has_a_prompt_passed_by_so_many_and_a_hand_over_wait_for_one_prompt(
    arrivals: list[int], num_prompts: int
) -> None:
    queue, sequence = make_queue("fcfs"), 0
    for sequence in range(num_prompts):
        queue.push(queued(sequence))
    served: list[Request] = []
    for num_arrivals in arrivals:
        for _ in range(num_arrivals):
            sequence += 1
            queue.push(queued(sequence, brings_kv=True))
        if (request := queue.peek()) is not None:
            queue.remove(request)
            if num_arrivals % 2:  # it may not start yet
                queue.push_front(request)
            else:
                served.append(request)
    served += [queue.pop() for _ in range(len(queue))]

    places = [place for place, request in enumerate(served) if request.kv_transfer is None]
    gaps = [after - before - 1 for before, after in zip([-1, *places], places, strict=False)]
    assert len(places) == num_prompts
    assert max(gaps) <= MAX_PASSING, "a prompt is passed by no more than that"
    assert [request.arrival_index for request in served if request.kv_transfer] == sorted(
        request.arrival_index for request in served if request.kv_transfer
    )


@pytest.mark.behaviour("C12")
def test_c12_fcfs_lets_one_prompt_in_between_hand_overs_that_do_not_end() -> None:
    queue = make_queue("fcfs")
    for index in range(2):
        queue.push(queued(index))
    for index in range(2, 3 * MAX_PASSING):
        queue.push(queued(index, brings_kv=True))

    served = [queue.pop().kv_transfer is None for _ in range(2 * MAX_PASSING + 2)]

    assert [place for place, is_prompt in enumerate(served) if is_prompt] == [MAX_PASSING, 2 * MAX_PASSING + 1]


@pytest.mark.behaviour("C12")
def test_c12_fcfs_lets_the_preempted_pass_a_prompt_that_was_passed_often_enough() -> None:
    queue = make_queue("fcfs")
    prompt, preempted = queued(0), queued(1)
    preempted.num_preemptions = 1
    prompt.num_passed_by = MAX_PASSING
    queue.push(prompt)
    queue.push(queued(2, brings_kv=True))
    queue.push_front(preempted)

    assert [queue.pop().request_id for _ in range(3)] == ["r1", "r0", "r2"]


@pytest.mark.behaviour("C12")
def test_c12_priority_serves_by_priority_then_arrival() -> None:
    queue = make_queue("priority")
    late, early, urgent = (
        queued(0, priority=1, arrival_s=5.0),
        queued(1, priority=1, arrival_s=3.0),
        queued(2, priority=-1, arrival_s=9.0),
    )
    for request in (late, early, urgent):
        queue.push(request)

    assert [queue.pop() for _ in range(3)] == [urgent, early, late]


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["push", "push_front", "pop", "remove"]), st.integers(0, 3)), max_size=60
)


@pytest.mark.behaviour("C12")
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@given(operations=OPERATIONS)
@settings(derandomize=True, deadline=None, max_examples=200)
def test_c12_both_queues_agree_with_a_list(policy: QueuePolicy, operations: list[tuple[str, int]]) -> None:
    queue, model, spare = make_queue(policy), list[Request](), list[Request]()
    for sequence, (operation, value) in enumerate(operations):
        if operation.startswith("push"):
            request = spare.pop() if spare and value % 2 else queued(sequence, priority=value)
            getattr(queue, operation)(request)
            model.insert(0 if operation == "push_front" else len(model), request)
            if policy == "priority":
                model.sort(key=order_key(policy))
        elif model:
            taken = model[0] if operation == "pop" else model[value % len(model)]
            if operation == "pop":
                assert queue.pop() is taken
            else:
                queue.remove(taken)
            model.remove(taken)
            spare.append(taken)
            assert taken not in queue
        assert len(queue) == len(model)
        assert queue.peek() is (model[0] if model else None)
        assert set(queue) == set(model)


@pytest.mark.behaviour("C12")
def test_c12_removed_requests_do_not_pile_up_in_the_priority_queue() -> None:
    queue = make_queue("priority")
    for index in range(1000):
        request = queued(index)
        queue.push(request)
        queue.remove(request)

    assert len(queue._heap) < 200  # type: ignore[attr-defined]
