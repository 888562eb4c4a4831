"""Loads that several requests wait for."""

from __future__ import annotations

import pytest

from tests.support.router.decode_world import add_handed_over, decode_world
from tests.support.scheduler.scheduler_requests import fresh_prompt


@pytest.mark.behaviour("O5")
def test_o5_a_prompt_that_several_requests_bring_along_is_loaded_once() -> None:
    world = decode_world()
    prompt = fresh_prompt(14)
    for index in range(3):
        add_handed_over(world, f"r{index}", prompt, max_tokens=3)
    world.step()
    assert list(world.connector.open_loads) == ["r0"]
    assert world.scheduler.stats().num_waiting == 2

    world.end_load("r0")
    world.step()

    for name in ("r1", "r2"):
        load = world.connector.open_loads[name]
        assert (load.first_block, len(load.block_ids)) == (3, 1), "its own copy of the last block, which it writes"
        world.end_load(name)
    world.run()
    for index in range(3):
        world.check_output(f"r{index}")
    assert world.endings["r2"].num_cached_tokens == 14


@pytest.mark.behaviour("O5")
def test_o5_whoever_waits_for_a_load_goes_ahead_when_it_is_given_up() -> None:
    world = decode_world()
    prompt = fresh_prompt(14)
    for index in range(2):
        add_handed_over(world, f"r{index}", prompt, max_tokens=3)
    world.step()
    world.scheduler.abort("r0")
    world.step()

    assert world.connector.open_loads["r1"].first_block == 0
    world.end_load("r0")
    world.end_load("r1")
    world.run()
    world.check_output("r1")
