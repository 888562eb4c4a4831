"""A new worker's steps grow as it learns what prompts take, beside streams that were promised a gap."""

from __future__ import annotations

import pytest

from engine.contract.promise import Promise
from engine.scheduler.policy.prompt_budget import UNSEEN_BLOCKS
from engine.scheduler.policy.step_time_fit import EARLY_FIT_STEPS, StepTimeFit
from engine.scheduler.policy.step_timer import work_of
from tests.support.scheduler.promised_gaps import (
    BLOCK_SIZE,
    LONG,
    MODEL,
    add_decoding,
    make_world,
    prompt_tokens,
    run_step,
)
from tests.support.scheduler.scheduler_requests import make_request


@pytest.mark.behaviour("P1")
@pytest.mark.parametrize(("most", "taken"), [(0, UNSEEN_BLOCKS * BLOCK_SIZE), (9, 18), (10, 20), (30, 20)])
def test_p1_a_step_takes_at_most_twice_the_prompt_tokens_of_the_largest_so_far(most: int, taken: int) -> None:
    """A new worker that has computed three short prompts does not know what a long one takes."""
    world = make_world()
    add_decoding(world, "a", Promise(itl_ms=31.5))
    world.scheduler._timer._fit.most_prompt_tokens = most

    world.add(make_request("long", LONG))

    assert run_step(world) == taken


@pytest.mark.behaviour("P1")
def test_p1_a_prompt_that_nobody_decodes_beside_may_be_longer_than_all_before() -> None:
    world = make_world(budget=LONG)
    world.scheduler._timer._fit.most_prompt_tokens = 0.0

    world.add(make_request("long", LONG, promise=Promise(itl_ms=200.0)))

    assert run_step(world) == LONG


@pytest.mark.behaviour("P1")
def test_p1_steps_of_a_new_worker_grow_as_it_learns() -> None:
    """Also of one that has only decoded for long. Each step is predicted by the ones before it."""
    world = make_world(budget=256)
    add_decoding(world, "a", Promise(itl_ms=1000.0))
    world.scheduler._timer._fit = fit = StepTimeFit()

    def run_step_of_machine() -> int:
        output = world.schedule()
        world.now_s += MODEL.seconds(work_of(world.scheduler._in_flight[-1].batch))
        while world.in_flight:
            world.complete_step()
        return prompt_tokens(output)

    for _ in range(EARLY_FIT_STEPS[-1]):
        run_step_of_machine()
    for name in ("first", "second"):
        world.add(make_request(name, LONG))
    taken, prices = [], []
    for _ in range(4):
        taken.append(run_step_of_machine())
        prices.append(fit.model.prompt_token_s)

    assert taken == [16, 32, 64, 2 * LONG - 16 - 32 - 64]
    assert len(set(prices)) == 4, "they are fitted after each"
