"""Beams are rows that share blocks: the blocks that they hold, and what happens when their request is preempted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.contract.config import SchedulerConfig
from engine.contract.errors import RequestRefusedError
from engine.contract.messages import BeamParams, FinishReason, GenerateRequest
from tests.support.scheduler.scheduler_requests import make_request
from tests.support.scheduler.scheduler_world import SchedulerWorld

BLOCK_SIZE = 4
WIDTH = 3
PROMPT_LENGTH = 10


def search(
    request_id: str, num_tokens: int = PROMPT_LENGTH, *, max_tokens: int = 12, **fields: object
) -> GenerateRequest:
    """A search behind the same prompt every time: which beams are dropped when depends on it."""
    prompt = tuple(range(100, 100 + num_tokens))
    request = make_request(request_id, prompt, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]
    return replace(request, sampling=replace(request.sampling, beams=BeamParams(width=WIDTH)))


def beam_world(*, num_blocks: int = 40, **config: object) -> SchedulerWorld:
    options: dict[str, object] = {"max_num_batched_tokens": 32, "max_num_seqs": 4, **config}
    return SchedulerWorld(SchedulerConfig(**options), num_blocks=num_blocks, block_size=BLOCK_SIZE)  # type: ignore[arg-type]


def tables_of(world: SchedulerWorld) -> list[list[int]]:
    table = world.scheduler._table
    return [table.block_tables(row)[0] for row in table.order.tolist()]


@pytest.mark.behaviour("O5")
def test_o5_beams_share_full_blocks_and_copy_the_last_one() -> None:
    world = beam_world()
    world.add(search("r0"))
    world.step()
    assert len(tables_of(world)) == 1

    output = world.schedule()

    tables = tables_of(world)
    assert len(tables) == WIDTH
    assert {tuple(table[:2]) for table in tables} == {tuple(tables[0][:2])}, "full blocks of the prompt are shared"
    assert len({table[2] for table in tables}) == WIDTH, "the block that they write is each one's own"
    assert output.copy_sources.tolist() == [tables[0][2]] * (WIDTH - 1)
    assert world.scheduler.stats().num_held_blocks == 2 + WIDTH
    world.complete_step()
    world.run()
    world.check_output("r0")


@pytest.mark.behaviour("O5")
def test_o5_no_block_is_copied_where_the_last_one_is_full() -> None:
    world = beam_world()
    world.add(search("r0", 2 * BLOCK_SIZE))
    world.step()

    output = world.schedule()

    assert output.copy_sources.size == 0
    assert world.scheduler.stats().num_held_blocks == 2 + WIDTH
    world.complete_step()
    world.run()
    world.check_output("r0")


@pytest.mark.behaviour("O5")
def test_o5_a_dropped_beam_gives_its_blocks_back_in_the_step_that_dropped_it() -> None:
    world = beam_world()
    world.add(search("r0"))
    world.step()
    num_dropped = 0
    while world.is_live("r0"):
        world.schedule()
        num_rows = len(tables_of(world))
        world.complete_step()
        num_dropped += world.is_live("r0") and len(tables_of(world)) < num_rows
        held = {block for table in tables_of(world) for block in table}
        assert world.scheduler.stats().num_held_blocks == len(held)

    assert num_dropped, "in some step two beams came from one"
    world.check_output("r0")


@pytest.mark.behaviour("O5")
def test_o5_a_search_waits_until_it_has_all_its_rows() -> None:
    world = beam_world(max_num_seqs=WIDTH + 1)
    world.add(make_request("before", 6, max_tokens=4))
    world.add(make_request("beside", 6, max_tokens=4))
    world.add(search("r0"))

    world.step()

    assert world.scheduler.stats().num_running == 2, "two rows are left, and it needs three"
    world.run()
    for request_id in ("before", "beside", "r0"):
        world.check_output(request_id)


@pytest.mark.behaviour("O5")
def test_o5_a_preempted_search_goes_on_with_the_beams_it_had() -> None:
    world = beam_world()
    world.add(search("r0"))
    for _ in range(6):
        world.step()
    search_before = world.scheduler._live_requests.live["r0"].beams
    assert search_before is not None
    num_tokens = search_before.search.num_tokens
    assert num_tokens > 2

    assert world.scheduler.reset_prefix_cache(preempt_running=True)
    assert world.scheduler.stats().num_held_blocks == 0
    world.step()
    output = world.step()

    assert output.num_tokens == WIDTH * num_tokens, "each beam computes all its tokens at once"
    world.run()
    world.check_output("r0")


@pytest.mark.behaviour("O5")
def test_o5_beams_that_lack_blocks_take_those_of_whoever_came_later() -> None:
    world = beam_world(num_blocks=16, max_num_seqs=6)
    world.add(search("r0", max_tokens=14))
    for number in range(3):
        start = 200 + 20 * number
        world.add(make_request(f"later-{number}", tuple(range(start, start + 6)), max_tokens=14))

    world.run()

    assert world.scheduler.stats().num_preemptions > 0
    for request_id in world.requests:
        world.check_output(request_id)


@pytest.mark.behaviour("O5")
def test_o5_all_beams_wait_where_one_lacks_a_block_that_a_step_in_flight_still_holds() -> None:
    world = beam_world(num_blocks=9, max_num_seqs=6)
    world.add(search("r0", 2 * BLOCK_SIZE, max_tokens=10))
    world.add(make_request("beside", tuple(range(200, 206)), max_tokens=14))
    for _ in range(4):
        world.step()
    world.schedule()
    world.schedule()
    world.complete_step()
    world.abort("beside")

    output = world.schedule()

    assert not output.has_work
    while world.in_flight:
        world.complete_step()
    world.run()
    world.check_output("r0")


@pytest.mark.behaviour("O5")
def test_o5_a_prompt_is_handed_over_without_a_token_and_its_search_begins_there() -> None:
    world = beam_world()
    world.add(search("r0", hand_over=True))
    world.run()
    last = world.endings["r0"].last
    assert last is not None
    assert (last.finish_reason, last.token_ids) == (FinishReason.HANDED_OVER, ())
    assert last.kv_transfer is not None
    assert last.kv_transfer.num_tokens == PROMPT_LENGTH
    request = search("r1")
    world.add(replace(request, kv_transfer=world.connector.offer(tuple(request.prompt_token_ids.tolist()))))
    world.step()
    world.end_load("r1")

    output = world.step()

    assert output.num_tokens == 1, "the last token of the prompt is computed again, to say what follows it"
    world.run()
    world.check_output("r1")
    assert world.endings["r1"].num_cached_tokens == PROMPT_LENGTH - 1


@pytest.mark.behaviour("O5")
def test_o5_a_search_that_moves_takes_the_kv_of_its_prompt_along() -> None:
    world = beam_world()
    world.add(search("r0"))
    for _ in range(5):
        world.step()

    assert world.move_out() == 1

    last = world.endings["r0"].last
    assert last is not None
    assert last.kv_transfer is not None
    assert last.kv_transfer.num_tokens == PROMPT_LENGTH
    assert world.scheduler.stats().num_held_blocks == 0
    assert world.scheduler.stats().num_leased_blocks == 3


@pytest.mark.behaviour("O5")
@pytest.mark.parametrize("num_steps", range(6))
def test_o5_an_abort_frees_all_beams(num_steps: int) -> None:
    world = beam_world()
    world.add(search("r0"))
    for _ in range(num_steps):
        world.step()
    world.schedule()

    assert world.abort("r0")

    while world.in_flight:
        world.complete_step()
    assert world.scheduler.stats().num_held_blocks == 0
    world.scheduler.check_integrity()


@pytest.mark.behaviour("O5")
def test_o5_more_beams_than_there_is_room_for_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(RequestRefusedError, match=r"3 beams are asked for, and a step computes at most 2"):
        beam_world(max_num_seqs=2).add(search("r0"))
    with pytest.raises(RequestRefusedError, match=r"3 beams of a prompt of 10 tokens need more KV"):
        beam_world(num_blocks=4).add(search("r0"))


@pytest.mark.behaviour("O2")
@pytest.mark.parametrize("num_blocks", range(17, 22))
def test_o2_blocks_that_the_beams_of_a_victim_share_count_once(num_blocks: int) -> None:
    """The world checks at every step that a request is only preempted for one that starts."""
    options = {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "policy": "priority",
        "enable_priority_preemption": True,
    }
    world = beam_world(num_blocks=num_blocks, **options)
    world.add(make_request("top", 8, max_tokens=12, priority=0))
    world.add(search("low", priority=5))
    for _ in range(6):
        world.step()
    world.add(make_request("high", 53, max_tokens=9, priority=1))

    world.run()

    for request_id in ("top", "low", "high"):
        world.check_output(request_id)
