"""One token budget and no phases: C1-C5, C8, and steps that run ahead."""

from __future__ import annotations

import pytest

from engine.contract.config import CacheConfig
from engine.contract.messages import FinishReason
from engine.contract.step import SchedulerOutput
from engine.scheduler.policy.gates import Verdict
from engine.scheduler.requests.request import Request
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.step_draft import StepDraft
from tests.support.router.decode_world import add_handed_over, decode_world
from tests.support.scheduler.scheduler_requests import fresh_prompt, make_config, make_request
from tests.support.scheduler.scheduler_world import SchedulerWorld


def granted(world: SchedulerWorld, output: SchedulerOutput) -> dict[str, int]:
    """Tokens that each request got in a step whose rows have not changed hands."""
    names = {world.scheduler._table.owner(row).request_id: row for row in output.rows.tolist()}
    counts = dict(zip(output.rows.tolist(), output.num_scheduled_tokens.tolist(), strict=True))
    return {name: counts[row] for name, row in names.items()}


@pytest.mark.behaviour("C1")
def test_c1_every_request_catches_up_with_its_known_tokens_whatever_they_are() -> None:
    world = SchedulerWorld(make_config(budget=10), num_blocks=32)
    world.add(make_request("prompt", 14, max_tokens=3))

    firsts = [world.step().first_positions.tolist() for _ in range(4)]

    assert firsts == [[0], [10], [14], [15]]
    world.run()
    world.check_output("prompt")


@pytest.mark.behaviour("C1")
def test_c1_prefill_and_decode_share_a_step() -> None:
    world = SchedulerWorld(make_config(budget=16), num_blocks=32)
    world.add(make_request("old", 4))
    world.step()
    world.add(make_request("new", 30))

    assert granted(world, world.schedule()) == {"old": 1, "new": 15}


@pytest.mark.behaviour("C2")
def test_c2_running_requests_come_first_and_the_budget_holds() -> None:
    world = SchedulerWorld(make_config(seqs=8, budget=8), num_blocks=64)
    for index in range(6):
        world.add(make_request(f"r{index}", 5))

    assert granted(world, world.schedule()) == {"r0": 5, "r1": 3}
    world.complete_step()
    assert granted(world, world.schedule()) == {"r0": 1, "r1": 2, "r2": 5}


@pytest.mark.behaviour("C2")
def test_c2_no_more_than_max_num_seqs_run() -> None:
    world = SchedulerWorld(make_config(seqs=2), num_blocks=64)
    for index in range(5):
        world.add(make_request(f"r{index}", 5, max_tokens=2))

    assert world.step().rows.size == 2
    assert world.scheduler.stats().num_waiting == 3
    world.run()
    assert all(ending.last is not None for ending in world.endings.values())


@pytest.mark.behaviour("C2")
def test_c2_nobody_is_admitted_in_a_step_that_preempts() -> None:
    # Two requests fill the pool of 8; the third would fit into what the preempted one leaves.
    world = SchedulerWorld(make_config(seqs=3), num_blocks=8)
    world.add(make_request("first", 15, max_tokens=20))
    world.add(make_request("second", 14, max_tokens=20))
    world.step()
    world.add(make_request("third", 2))

    while world.scheduler.stats().num_preemptions == 0:
        output = world.step()

    assert output.new_rows == ()
    assert world.scheduler.stats().num_running == 1


@pytest.mark.behaviour("C3")
def test_c3_a_long_prefill_takes_no_more_than_the_threshold() -> None:
    world = SchedulerWorld(make_config(budget=64, long_prefill_token_threshold=8), num_blocks=64)
    world.add(make_request("long", 30))
    world.add(make_request("short", 6))

    assert granted(world, world.schedule()) == {"long": 8, "short": 6}
    world.complete_step()
    assert granted(world, world.schedule()) == {"long": 8, "short": 1}


@pytest.mark.behaviour("C3")
def test_c3_without_chunked_prefill_a_prompt_waits_whole() -> None:
    world = SchedulerWorld(make_config(budget=64, enable_chunked_prefill=False), num_blocks=64)
    world.add(make_request("a", 40))
    world.add(make_request("b", 30))
    world.add(make_request("c", 2))

    assert granted(world, world.schedule()) == {"a": 40}
    world.complete_step()
    assert granted(world, world.schedule()) == {"a": 1, "b": 30, "c": 2}


class OnlyEvenPriorities:
    """A gate for tests: odd priorities may not start."""

    def ask(self, request: Request, _draft: StepDraft, _num_tokens: int, /) -> Verdict:
        """Pass over the odd ones."""
        return Verdict.PASSED_OVER if request.message.priority % 2 else Verdict.ADMITTED


@pytest.mark.behaviour("C3")
def test_c3_without_chunked_prefill_a_damaged_prompt_is_computed_whole_from_its_first_damage_on() -> None:
    world = decode_world(num_blocks=32, enable_chunked_prefill=False)
    add_handed_over(world, "damaged", fresh_prompt(24), max_tokens=3)
    world.step()
    world.end_load("damaged", [1, 4])

    output = world.step()

    assert (output.first_positions.tolist(), output.num_scheduled_tokens.tolist()) == ([4], [21])
    assert output.num_samples.all()
    world.run()
    world.check_output("damaged")


@pytest.mark.behaviour("C3")
def test_c3_without_chunked_prefill_a_damaged_prompt_waits_until_all_of_it_fits_the_step() -> None:
    world = decode_world(num_blocks=64, seqs=4, budget=64, enable_chunked_prefill=False)
    add_handed_over(world, "first", fresh_prompt(40), max_tokens=3)
    add_handed_over(world, "second", fresh_prompt(40), max_tokens=3)
    world.step()
    for name in ("first", "second"):
        world.end_load(name, [0, 3])

    counts = [world.step().num_scheduled_tokens.tolist() for _ in range(2)]

    assert counts == [[41], [1, 41]]
    world.run()
    for name in ("first", "second"):
        world.check_output(name)


@pytest.mark.behaviour("C4")
def test_c4_who_cannot_take_a_token_is_passed_over_and_keeps_its_place() -> None:
    scheduler = Scheduler(
        make_config(), CacheConfig(block_size=4), num_blocks=64, max_model_len=64, gates=[OnlyEvenPriorities()]
    )
    for index in range(4):
        scheduler.add_request(make_request(f"r{index}", 4, priority=index))

    started = [new_row.request_id for new_row in scheduler.schedule().new_rows]

    assert started == ["r0", "r2"]
    assert [request.request_id for request in scheduler._live_requests.waiting] == ["r1", "r3"]


@pytest.mark.behaviour("C5")
def test_c5_no_position_at_or_past_the_model_length_is_computed() -> None:
    world = SchedulerWorld(make_config(), num_blocks=32, max_model_len=20)
    world.add(make_request("a", 15, max_tokens=100))
    last_position = 0
    while world.scheduler.has_unfinished():
        output = world.step()
        last_position = max(last_position, int((output.first_positions + output.num_scheduled_tokens).max()) - 1)

    assert len(world.endings["a"].token_ids) == 5
    assert last_position == 18


@pytest.mark.behaviour("C8")
def test_c8_computed_counts_advance_when_a_step_is_scheduled() -> None:
    world = SchedulerWorld(make_config(budget=8), num_blocks=32)
    world.add(make_request("a", 14, max_tokens=3))

    first, second, third = (world.schedule() for _ in range(3))

    assert [output.first_positions.tolist() for output in (first, second, third)] == [[0], [8], [14]]
    assert third.num_samples.tolist() == [1]
    while world.in_flight:
        world.complete_step()
    world.run()
    world.check_output("a")


@pytest.mark.behaviour("C8")
def test_c8_running_ahead_never_computes_one_step_too_many() -> None:
    world = SchedulerWorld(make_config(), num_blocks=32)
    world.add(make_request("a", 4, max_tokens=2))

    sizes = [world.schedule().rows.size for _ in range(4)]

    assert sizes == [1, 1, 0, 0]


@pytest.mark.behaviour("C8")
def test_c8_tokens_past_a_stop_that_ran_ahead_are_dropped_and_its_row_is_used_again() -> None:
    probe = SchedulerWorld(make_config(), num_blocks=32)
    request = make_request("a", 4, max_tokens=4)
    probe.add(request)
    probe.run()
    stop = probe.endings["a"].token_ids[0]
    world = SchedulerWorld(make_config(seqs=1), num_blocks=32)
    world.add(make_request("a", request.prompt_token_ids, stop=(stop,)))
    world.add(make_request("b", 4, max_tokens=2))
    world.schedule()
    world.schedule()

    world.complete_step()
    assert world.scheduler.stats().num_free_blocks < 32, "the step that runs ahead may still write"
    output = world.schedule()
    assert [new_row.request_id for new_row in output.new_rows] == ["b"]
    world.complete_step()

    assert world.endings["a"].token_ids == [stop]
    while world.in_flight:
        world.complete_step()
    world.run()
    world.check_output("b")
    assert world.scheduler.stats().num_free_blocks == 32


def test_rows_of_a_steady_step_are_arrays_only() -> None:
    world = SchedulerWorld(make_config(), num_blocks=32, block_size=8)
    for index in range(3):
        world.add(make_request(f"r{index}", 9))
    world.step()

    output = world.step()

    assert (output.new_rows, output.released_rows.size, output.append_rows.size) == ((), 0, 0)
    assert output.rows.size == 3


def test_tokens_that_came_along_count_as_output_and_are_not_emitted_again() -> None:
    world = SchedulerWorld(make_config(), num_blocks=32)
    world.add(make_request("whole", 9, max_tokens=6))
    world.run()
    prompt = world.requests["whole"].prompt_token_ids
    tokens = tuple(world.endings["whole"].token_ids)

    moved = SchedulerWorld(make_config(), num_blocks=32)
    moved.add(make_request("moved", prompt, max_tokens=6, output=tokens[:4]))
    moved.run()

    assert tuple(moved.endings["moved"].token_ids) == tokens[4:]


def test_a_request_that_came_with_all_its_tokens_ends_at_once() -> None:
    world = SchedulerWorld(make_config(), num_blocks=32)

    world.add(make_request("full", 9, max_tokens=2, output=(1, 2)))
    world.add(make_request("stopped", 9, max_tokens=9, output=(1, 2), stop=(2,)))

    ends = {name: ending.last for name, ending in world.endings.items()}
    assert ends["full"] is not None
    assert ends["full"].finish_reason is FinishReason.LENGTH
    assert ends["stopped"] is not None
    assert (ends["stopped"].finish_reason, ends["stopped"].stop_token_id) == (FinishReason.STOP, 2)
