"""A prefill that is cancelled half-way leaves no half-written blocks."""

from __future__ import annotations

import pytest

from engine.contract.config import SchedulerConfig
from engine.frontend.offline import generate
from tests.support.engine.chain_engine import chain_engine
from tests.support.engine.chain_runner import expected_tokens
from tests.support.engine.requests import greedy_request

BLOCK_SIZE = 4
CHUNK = 10


@pytest.mark.known_failure(22)
@pytest.mark.parametrize("num_steps", range(5))
def test_only_whole_blocks_of_a_cancelled_prefill_are_found_and_they_are_right(num_steps: int) -> None:
    prompt = tuple(range(100, 150))
    core = chain_engine(block_size=BLOCK_SIZE, scheduler=SchedulerConfig(max_num_batched_tokens=CHUNK, max_num_seqs=4))
    core.add_request(greedy_request("cancelled", prompt, max_tokens=4))
    for _ in range(num_steps):
        core.step()
    core.abort(["cancelled"])
    while core.has_work():
        core.step()
    assert core.load_report().num_free_blocks == core.load_report().num_blocks

    outputs = generate(core, [greedy_request("next", prompt, max_tokens=4)])

    assert outputs["next"] == expected_tokens(prompt, 4)
    assert core.stats().scheduler.prefix_hit_tokens == num_steps * CHUNK // BLOCK_SIZE * BLOCK_SIZE
    core.scheduler.check_integrity()
