"""F3: draft tokens are scheduled and verified in one step, and what was rejected is undone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.contract.config import SchedulerConfig
from engine.contract.errors import ConfigError
from engine.contract.messages import FinishReason, GenerateRequest, SamplingParams
from engine.contract.token_ids import TokenIds
from engine.drafting.proposer import Drafting
from tests.support.engine.proposers import RepeatLast
from tests.support.scheduler.scheduler_world import SchedulerWorld, drafts_for_worlds, undisturbed_output

BLOCK_SIZE = 4


def make_world(
    *, accuracy: float = 1.0, max_draft_tokens: int = 3, num_blocks: int = 32, **options: object
) -> SchedulerWorld:
    config = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "watermark": 0.0, **options}
    return SchedulerWorld(
        SchedulerConfig(**config),  # type: ignore[arg-type]
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        drafting=drafts_for_worlds(max_draft_tokens, accuracy=accuracy, proposes_all=True),
    )


def request(
    name: str = "a", prompt: Sequence[int] = (1, 2, 3, 4, 0), *, max_tokens: int = 20, **sampling: object
) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=TokenIds.of(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
    )


def most_drafts_in_a_step(world: SchedulerWorld) -> int:
    """Runs to the end."""
    most = 0
    while world.scheduler.has_work():
        most = max(most, int(world.step().draft_token_ids.size))
        world.scheduler.check_integrity()
    return most


@pytest.mark.behaviour("F3")
def test_f3_right_drafts_become_output_in_fewer_steps() -> None:
    world = make_world()
    world.add(request(max_tokens=9))

    counts = [world.step().num_samples.tolist() for _ in range(3)]

    assert counts == [[1], [4], [4]], "the prompt's successor, then three drafts and the token after them"
    world.check_output("a")
    assert world.endings["a"].last is not None
    assert world.endings["a"].last.finish_reason is FinishReason.LENGTH


@pytest.mark.behaviour("F3")
def test_f3_wrong_drafts_change_nothing_and_give_their_blocks_back() -> None:
    world = make_world(accuracy=0.0, max_draft_tokens=9)
    world.add(request())

    while world.scheduler.has_work():
        world.step()
        num_tokens = 5 + len(world.endings["a"].token_ids)
        if world.is_live("a"):
            assert world.scheduler.stats().num_held_blocks == -(-num_tokens // BLOCK_SIZE)

    world.check_output("a")
    stats = world.scheduler.stats()
    assert stats.num_draft_tokens > 9
    assert stats.num_accepted_draft_tokens == 0
    assert stats.num_generated_tokens == 20


@pytest.mark.behaviour("C13")
def test_c13_drafts_and_acceptances_are_counted() -> None:
    world = make_world(accuracy=0.6)
    world.add(request())

    num_drafts = 0
    while world.scheduler.has_work():
        num_drafts += world.step().draft_token_ids.size

    stats = world.scheduler.stats()
    assert stats.num_draft_tokens == num_drafts
    assert 0 < stats.num_accepted_draft_tokens < num_drafts
    assert stats.num_generated_tokens == 20
    assert stats.num_scheduled_tokens == 5 + (20 - 1) + num_drafts - stats.num_accepted_draft_tokens


@pytest.mark.parametrize("max_draft_tokens", [1, 4, 60])
@pytest.mark.behaviour("C5")
def test_c5_drafts_are_trimmed_to_the_end_of_the_output(max_draft_tokens: int) -> None:
    world = make_world(max_draft_tokens=max_draft_tokens, max_num_batched_tokens=64)
    world.add(request("long", max_tokens=1000))
    last_position = 0

    while world.scheduler.has_work():
        output = world.step()
        if output.rows.size:
            last_position = max(last_position, int((output.first_positions + output.num_scheduled_tokens).max()) - 1)

    world.check_output("long")
    assert last_position == 64 - 2, "the last token of the longest output needs no KV"


@pytest.mark.parametrize("stop_at", range(1, 9))
@pytest.mark.behaviour("F3")
def test_f3_a_stop_inside_accepted_drafts_ends_the_output_there(stop_at: int) -> None:
    expected = undisturbed_output(request(), 64)
    stop = expected[stop_at]
    world = make_world(max_draft_tokens=6)

    world.add(request(stop_token_ids=(stop,), min_tokens=stop_at))

    world.run()
    last = world.endings["a"].last
    assert last is not None
    assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, stop)
    assert world.endings["a"].token_ids == expected[: len(world.endings["a"].token_ids)]
    world.check_output("a")


@pytest.mark.behaviour("F3")
def test_f3_requests_with_many_stop_tokens_get_no_drafts() -> None:
    world = make_world()
    world.add(request(stop_token_ids=tuple(range(100, 120))))

    assert most_drafts_in_a_step(world) == 0
    world.check_output("a")


@pytest.mark.behaviour("F3")
def test_f3_drafts_take_only_what_is_left_of_the_budget() -> None:
    world = make_world(max_num_batched_tokens=8, max_draft_tokens=9)
    world.add(request("a", max_tokens=30))
    world.step()
    world.add(request("b", prompt=[2] * 17, max_tokens=2))

    steps = [world.step() for _ in range(2)]

    assert [step.num_tokens for step in steps] == [8, 8]
    assert [step.draft_token_ids.size for step in steps] == [0, 0], "the prompt goes before them"


@pytest.mark.behaviour("F3")
def test_f3_drafts_for_which_no_blocks_are_free_are_left_out() -> None:
    """Two requests hold two of six blocks each; nine drafts each would need four more, and three fill what is held."""
    world = make_world(num_blocks=6, max_draft_tokens=9)
    for name in ("a", "b"):
        world.add(request(name, prompt=[int(name == "a")] * 4, max_tokens=12))
    world.step()

    assert world.step().draft_token_ids.size == 2 * 3

    world.run()
    for name in ("a", "b"):
        world.check_output(name)


@pytest.mark.behaviour("F3")
def test_f3_a_row_whose_drafts_are_in_flight_is_in_no_other_step() -> None:
    world = make_world()
    world.add(request("a"))
    world.step()
    first = world.schedule()
    world.add(request("b"))

    second = world.schedule()

    assert first.draft_token_ids.size > 0
    assert set(second.rows.tolist()).isdisjoint(first.rows.tolist())
    world.run()
    for name in ("a", "b"):
        world.check_output(name)


@pytest.mark.parametrize("how", ["abort", "reset", "drain"])
@pytest.mark.behaviour("F3")
def test_f3_who_leaves_with_drafts_in_flight_leaves_nothing_behind(how: str) -> None:
    world = make_world(accuracy=0.5)
    world.add(request("a"))
    world.step()
    while not world.schedule().draft_token_ids.size:
        world.complete_step()

    if how == "abort":
        world.abort("a")
    elif how == "reset":
        world.scheduler.reset_prefix_cache(preempt_running=True)
    world.complete_step()
    if how == "drain":
        world.move_out()
        for lease_id in list(world.connector.open_leases):
            world.end_lease(lease_id)

    world.run()
    world.check_output("a")
    assert world.scheduler.stats().num_free_blocks == 32


@pytest.mark.behaviour("F3")
def test_f3_only_accepted_tokens_are_published() -> None:
    """A block's content is what was accepted: a request that continues with rejected drafts finds nothing."""
    world = make_world(accuracy=0.0, max_draft_tokens=9)
    world.add(request("a", prompt=[1] * 4, max_tokens=12))
    world.run()
    output = undisturbed_output(request("a", prompt=[1] * 4, max_tokens=12), 64)

    world.add(request("same", prompt=[1, 1, 1, 1, *output[:9]], max_tokens=2))
    world.add(request("other", prompt=[1, 1, 1, 1, output[0], *[token + 1 for token in output[1:9]]], max_tokens=2))
    world.run()

    assert world.endings["same"].num_cached_tokens == 12
    assert world.endings["other"].num_cached_tokens == 4


@pytest.mark.behaviour("F3")
def test_f3_as_many_drafts_as_zero_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_draft_tokens"):
        Drafting(proposer=RepeatLast(), max_draft_tokens=0)


@pytest.mark.behaviour("F3", "C13")
def test_f3_right_drafts_are_counted_by_their_place() -> None:
    world = make_world(max_draft_tokens=11, max_num_batched_tokens=64)
    world.add(request(max_tokens=13))

    most_drafts_in_a_step(world)

    stats = world.scheduler.stats()
    assert (stats.num_drafted_rows, stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (1, 11, 11)
    assert [getattr(stats, f"num_accepted_at_{place}") for place in range(1, 9)] == [1] * 8
    assert stats.num_accepted_later == 3


@pytest.mark.behaviour("F3")
@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
def test_f3_drafts_as_many_as_pay_change_no_output(accuracy: float) -> None:
    drafting = drafts_for_worlds(6, accuracy=accuracy, proposes_all=True)
    assert drafting is not None
    world = SchedulerWorld(
        SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=4, watermark=0.0),
        num_blocks=32,
        block_size=BLOCK_SIZE,
        drafting=replace(drafting, is_adaptive=True),
    )
    names = ("a", "b", "c")
    for name in names:
        world.add(request(name, max_tokens=24))

    most_drafts_in_a_step(world)

    for name in names:
        world.check_output(name)
    assert world.scheduler.stats().num_draft_tokens > 0
