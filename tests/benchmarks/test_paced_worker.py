"""Workers whose steps last as long as another machine's."""

from __future__ import annotations

import pytest

from benchmarks.scaling_parts.paced_worker import PacedRunner
from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.step_time import StepTimeModel
from engine.contract.token_ids import TokenIds
from engine.frontend.offline import generate
from simulation.machine import Machine
from tests.support.clock import ManualClock
from tests.support.engine.chain_engine import chain_engine
from tests.support.engine.chain_runner import expected_tokens

PRICES = StepTimeModel(base_s=1.0, row_s=0.5, context_token_s=0.25, prompt_token_s=2.0, num_steps=1)


@pytest.mark.parametrize("device", ["cpu", "cuda"], ids=["one by one", "a step ahead"])
def test_engine_takes_as_long_as_the_prices_of_its_steps_say(device: str) -> None:
    """A prompt of 8 tokens and three tokens behind it: the first comes with the prompt, two steps follow."""
    clock = ManualClock()
    core = chain_engine(device=device)
    core.runner = PacedRunner(core.runner, Machine(name="slow", step_time=PRICES), clock=clock, sleep=clock.advance)
    prompt = list(range(1, 9))
    request = GenerateRequest(
        request_id="a", prompt_token_ids=TokenIds.of(prompt), sampling=SamplingParams(max_tokens=3)
    )

    began_s = clock()
    tokens = generate(core, [request])["a"]

    assert tokens == expected_tokens(prompt, 3)
    with_prompt_s = 1.0 + 8 * 2.0
    one_s, two_s = (1.0 + 0.5 + 0.25 * num_context for num_context in (8, 9))
    assert clock() - began_s == pytest.approx(with_prompt_s + one_s + two_s)
