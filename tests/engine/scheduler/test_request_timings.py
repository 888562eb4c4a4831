"""The timings that an engine reports of a traced request with its first token, and not of other requests."""

from __future__ import annotations

import dataclasses

import pytest

from engine.contract.config import SchedulerConfig
from engine.contract.tracing.request_timings import MAX_LOADS, MAX_STEPS, RequestTimings, TraceContext
from engine.frontend.engine_core import EngineCore
from engine.scheduler.requests.timeline import Timeline
from tests.support.clock import ManualClock
from tests.support.engine.chain_engine import chain_engine
from tests.support.engine.requests import greedy_request


def run(core: EngineCore) -> list[RequestTimings]:
    """All timings that are told until nothing is left to do."""
    told: list[RequestTimings] = []
    while core.has_work():
        told += [item for _, item in core.step().told if isinstance(item, RequestTimings)]
    return told


def add(core: EngineCore, name: str, num_tokens: int, *, is_traced: bool = True, client_id: str = "") -> None:
    request = greedy_request(name, range(3, 3 + num_tokens), max_tokens=4, client_id=client_id)
    core.add_request(dataclasses.replace(request, trace=TraceContext() if is_traced else None))


@pytest.mark.parametrize("device", ["cpu", "late"])
def test_each_chunk_of_a_prompt_is_a_step(device: str) -> None:
    core = chain_engine(scheduler=SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=4), device=device)
    add(core, "long", 20)
    add(core, "silent", 20, is_traced=False)

    [told] = run(core)

    assert (told.request_id, told.loads) == ("long", ())
    assert [step.num_tokens for step in told.steps] == [8, 8, 4]
    ends = [step.start_s + step.duration_s for step in told.steps]
    assert all(step.start_s >= end - 1e-6 for step, end in zip(told.steps[1:], ends, strict=False))
    assert 0 <= told.queue_s <= told.steps[0].start_s + told.steps[0].duration_s
    assert ends[-1] <= told.first_token_s


def test_timings_go_to_who_sent_the_request() -> None:
    core = chain_engine()
    for number, client_id in enumerate(("one", "two")):  # of other lengths: none waits for a block of the other
        add(core, f"of {client_id}", 2 + number, client_id=client_id)

    by_client = core.step().told_by_client()

    assert {client_id: [item.request_id for item in told] for client_id, told in by_client.items()} == {
        "one": ["of one"],
        "two": ["of two"],
    }


def test_steps_and_loads_that_are_told_are_bounded() -> None:
    clock = ManualClock()
    timeline = Timeline(arrived_s=clock(), clock=clock)
    for _ in range(MAX_STEPS + 10):
        start_s = clock()
        clock.advance(0.5)
        timeline.note_step(start_s=start_s, end_s=clock(), num_tokens=7)
    for _ in range(MAX_LOADS + 1):
        timeline.note_load(duration_s=0.25, num_bytes=10, num_blocks=2, num_failed_blocks=1, source="p")

    told = timeline.told("a", queue_s=None)

    assert (len(told.steps), len(told.loads)) == (MAX_STEPS, MAX_LOADS)
    last = told.steps[-1]
    assert (last.num_steps, last.num_tokens) == (11, 77)
    assert last.start_s + last.duration_s == pytest.approx(told.first_token_s)
    assert sum(step.duration_s for step in told.steps) == pytest.approx(0.5 * (MAX_STEPS + 10))
    assert told.loads[0].start_s == pytest.approx(told.first_token_s - 0.25)
