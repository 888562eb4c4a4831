"""O7: several decode steps are one where nothing can change between them, and never one too many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine.contract.config import EngineConfig, ModelConfigSource, SchedulerConfig, SpeculativeConfig
from engine.contract.errors import ConfigError
from engine.contract.messages import FinishReason, GenerateRequest, SamplingParams
from engine.contract.promise import Promise
from engine.contract.token_ids import TokenIds
from tests.support.engine.strict_runner import kv_values, next_token
from tests.support.scheduler.scheduler_world import SchedulerWorld

BLOCK_SIZE = 4
PROMPT = (1, 2, 3, 4, 0)


def make_world(*, max_decode_steps: int = 4, num_blocks: int = 32, **options: object) -> SchedulerWorld:
    config = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "watermark": 0.0, **options}
    return SchedulerWorld(
        SchedulerConfig(max_decode_steps=max_decode_steps, **config),  # type: ignore[arg-type]
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
    )


def request(
    name: str = "a", prompt: Sequence[int] = PROMPT, *, max_tokens: int = 20, **sampling: object
) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=TokenIds.of(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
    )


def num_steps_each(world: SchedulerWorld) -> list[int]:
    """How often rows decode in each step, to the end."""
    found: list[int] = []
    while world.scheduler.has_work():
        output = world.step()
        world.scheduler.check_integrity()
        if output.has_work:
            found.append(output.num_decode_steps)
    return found


@pytest.mark.behaviour("O7")
def test_o7_the_output_ends_at_its_limit_with_no_position_computed_in_vain() -> None:
    world = make_world()
    world.add(request(max_tokens=11))

    assert num_steps_each(world) == [1, 4, 4, 2], "the prompt's successor, then all others"
    world.check_output("a")
    assert world.runner.num_computed_positions == len(PROMPT) + 10
    stats = world.scheduler.stats()
    assert (stats.num_generated_tokens, stats.num_draft_tokens, stats.num_drafted_rows) == (11, 0, 0)


@pytest.mark.behaviour("O7")
def test_o7_the_request_nearest_to_its_limit_says_how_often() -> None:
    world = make_world()
    world.add(request("a", max_tokens=3))
    world.add(request("b", PROMPT[::-1], max_tokens=9))

    assert num_steps_each(world) == [1, 2, 4, 2]
    world.check_output("a")
    world.check_output("b")
    assert world.runner.num_computed_positions == 2 * len(PROMPT) + 2 + 8


@pytest.mark.behaviour("O7")
def test_o7_tokens_behind_a_stop_are_dropped_and_their_blocks_given_back() -> None:
    world = make_world(max_decode_steps=9)
    tokens = list(PROMPT)
    for _ in range(3):
        tokens.append(next_token(kv_values(tokens)[-1]))
    world.add(request(stop_token_ids=(tokens[-1],), min_tokens=3))

    num_steps_each(world)

    world.check_output("a")
    last = world.endings["a"].last
    assert last is not None
    assert last.finish_reason is FinishReason.STOP
    assert len(world.endings["a"].token_ids) == 3
    assert world.scheduler.stats().num_held_blocks == 0


@pytest.mark.behaviour("O7")
def test_o7_while_somebody_waits_there_is_one_step_at_a_time() -> None:
    world = make_world(max_num_seqs=1)
    world.add(request("a", max_tokens=9))
    world.add(request("b", max_tokens=9))

    assert num_steps_each(world) == [1] * 9 + [1, 4, 4]


@pytest.mark.behaviour("O7")
@pytest.mark.parametrize("cuts", [False, True])
def test_o7_a_promised_gap_allows_it_where_the_runner_cuts_steps_short(cuts: bool) -> None:
    world = make_world(cuts_decode_steps=cuts)
    world.add(replace(request(max_tokens=11), promise=Promise(itl_ms=50.0)))

    assert num_steps_each(world) == ([1, 4, 4, 2] if cuts else [1] * 11)
    world.check_output("a")


@pytest.mark.behaviour("O7")
def test_o7_blocks_that_are_not_there_make_fewer_steps() -> None:
    """Two requests hold two of six blocks each, with two positions left, and would need four blocks."""
    world = make_world(num_blocks=6, max_decode_steps=8)
    world.add(request("a", max_tokens=12))
    world.add(request("b", PROMPT[::-1], max_tokens=12))

    assert num_steps_each(world)[:2] == [1, 3]
    world.check_output("a")
    world.check_output("b")


@pytest.mark.behaviour("O7")
def test_o7_with_steps_that_run_ahead_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_decode_steps \(2\) and async_scheduling"):
        SchedulerConfig(max_decode_steps=2, async_scheduling=True)
    with pytest.raises(ConfigError, match="max_decode_steps must be at least 1"):
        SchedulerConfig(max_decode_steps=0)
    assert not SchedulerConfig(max_decode_steps=2).runs_ahead("cuda")


@pytest.mark.behaviour("O7")
def test_o7_beside_a_proposer_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_decode_steps \(2\) has no effect with speculative.method 'ngram'"):
        EngineConfig(
            model=ModelConfigSource(path=Path("model")),
            scheduler=SchedulerConfig(max_decode_steps=2),
            speculative=SpeculativeConfig(method="ngram"),
        )
