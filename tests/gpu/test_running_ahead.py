"""F5 where it matters: on a GPU no launch waits for the device, and the tokens are those of an engine that does wait.

Runs where CUDA is: `make test-gpu`.
"""

from __future__ import annotations

import random

import pytest
import torch

from engine.build import build_engine
from engine.contract.config import CacheConfig, EngineConfig, ModelConfigSource, SchedulerConfig
from engine.contract.executor import StepRunner
from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.step import PendingStep, SchedulerOutput
from engine.contract.token_ids import TokenIds
from engine.frontend.engine_core import EngineCore
from engine.frontend.offline import run_requests
from engine.model.builtin import builtin_model_dir
from tests.support.engine.collected_output import collect

pytestmark = pytest.mark.gpu

NUM_TOKENS = 24
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True),
    "random": SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, top_p=0.9, seed=3, num_logprobs=2),
    "limited": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, top_k=20, min_p=0.02, seed=4, min_tokens=9),
    "ruled": SamplingParams(max_tokens=NUM_TOKENS, logit_bias=((7, 3.0),), bad_words=((5,),), num_prompt_logprobs=2),
}
PENALISED = SamplingParams(max_tokens=NUM_TOKENS, repetition_penalty=1.3, bad_words=((7, 9),))


class StrictRunner:
    """Wraps a runner; a launch that waits for the device fails, once compilation and allocation are done with."""

    def __init__(self, inner: StepRunner) -> None:
        self._inner = inner
        self.is_strict = False

    def launch(self, output: SchedulerOutput) -> PendingStep:
        """Launch under watch."""
        torch.cuda.set_sync_debug_mode("error" if self.is_strict else "default")
        try:
            return self._inner.launch(output)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def build(*, async_scheduling: bool) -> EngineCore:
    return build_engine(
        EngineConfig(
            model=ModelConfigSource(path=builtin_model_dir(), device="cuda", dtype="bfloat16"),
            cache=CacheConfig(num_blocks=512, enable_prefix_caching=False),
            scheduler=SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=16, async_scheduling=async_scheduling),
        )
    ).core


def requests(**samplings: SamplingParams) -> list[GenerateRequest]:
    rng = random.Random(2)
    return [
        GenerateRequest(
            request_id=f"{kind}-{length}",
            prompt_token_ids=TokenIds.of(rng.randrange(3, 250) for _ in range(length)),
            sampling=sampling,
        )
        for kind, sampling in samplings.items()
        for length in (1, 17, 90)
    ]


def test_no_launch_waits_for_the_device() -> None:
    core = build(async_scheduling=True)
    core.runner = runner = StrictRunner(core.runner)
    first = collect(run_requests(core, requests(**SAMPLINGS)))

    runner.is_strict = True
    again = collect(run_requests(core, requests(**SAMPLINGS)))

    assert {name: output.token_ids for name, output in again.items()} == {
        name: output.token_ids for name, output in first.items()
    }
    assert core.stats().num_waited_steps == 0


def test_tokens_and_logprobs_are_the_same_with_it_on_and_off() -> None:
    wanted = requests(**SAMPLINGS, penalised=PENALISED)
    off, on = build(async_scheduling=False), build(async_scheduling=True)

    expected, actual = collect(run_requests(off, wanted)), collect(run_requests(on, wanted))

    for name, output in expected.items():
        assert actual[name].token_ids == output.token_ids, name
        assert [entry.token_ids for entry in actual[name].logprobs] == [entry.token_ids for entry in output.logprobs]
        assert (actual[name].prompt is None) == (output.prompt is None)
    assert (off.stats().num_waited_steps, on.stats().num_waited_steps > 0) == (0, True)
