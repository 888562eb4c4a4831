"""Requests that come from another worker in the middle of their output: K1."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.router.decode_world import decode_world
from tests.support.scheduler.scheduler_requests import fresh_prompt, make_request
from tests.support.scheduler.scheduler_world import SchedulerWorld, undisturbed_output


def add_moved(world: SchedulerWorld, name: str, prompt: tuple[int, ...], *, num_output_tokens: int) -> None:
    """A request that comes from another worker after so many output tokens, with the KV of all but the last one."""
    request = make_request(name, prompt, max_tokens=num_output_tokens + 3)
    output = tuple(undisturbed_output(request, world.max_total_tokens)[:num_output_tokens])
    offer = world.connector.offer(prompt + output[:-1])
    world.add(replace(request, output_token_ids=output, kv_transfer=offer))


@pytest.mark.behaviour("K1")
def test_k1_of_a_moved_request_only_prompt_tokens_count_as_cached_and_as_remote() -> None:
    world = decode_world()
    prompt = fresh_prompt(10)
    add_moved(world, "a", prompt, num_output_tokens=8)
    world.step()
    world.end_load("a")
    world.run()

    world.check_output("a")
    assert (world.endings["a"].num_cached_tokens, world.endings["a"].num_remote_tokens) == (10, 10)
    assert world.scheduler.stats().remote_hit_tokens == 17, "what was loaded, output included"


@pytest.mark.behaviour("K1")
def test_k1_of_a_moved_request_the_damaged_part_of_the_prompt_counts_as_neither() -> None:
    world = decode_world()
    prompt = fresh_prompt(10)
    world.add(make_request("earlier", prompt[:5], max_tokens=1))
    world.run()
    add_moved(world, "a", prompt, num_output_tokens=8)
    world.step()
    world.end_load("a", [0, 3])
    world.run()

    world.check_output("a")
    assert (world.endings["a"].num_cached_tokens, world.endings["a"].num_remote_tokens) == (6, 2)
