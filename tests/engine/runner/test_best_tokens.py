"""Decode steps in which all rows are greedy make no logits where the head is nothing but a product in panels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.contract.config import CacheConfig, DTypeName, EngineConfig, ModelConfigSource, SchedulerConfig
from engine.contract.messages import SamplingParams
from engine.contract.step import ModelRunnerOutput
from engine.layers.panel_weight import suits_panels
from engine.model.registry import ANY_CODE
from engine.model.step_context import StepContext
from engine.runner.model_runner import ModelRunner
from tests.support.engine.checkpoints import VOCAB_SIZE
from tests.support.engine.step_driver import GREEDY, StepDriver

TELLING = SamplingParams(max_tokens=1 << 20, num_logprobs=1)
"""Greedy too, but what it tells is read from the logits."""

NUM_ROWS, NUM_PROMPT_TOKENS, NUM_STEPS = 5, 9, 12


class CountingRunner(ModelRunner):
    """Counts how often logits are made."""

    def __init__(self, path: Path, dtype: DTypeName) -> None:
        super().__init__(
            EngineConfig(
                model=ModelConfigSource(path=path, device="cpu", dtype=dtype, code=ANY_CODE),
                cache=CacheConfig(block_size=16, num_blocks=256),
                scheduler=SchedulerConfig(max_num_seqs=NUM_ROWS),
            )
        )
        self.num_logits = 0
        logits = self._model.logits

        def counted(hidden: torch.Tensor) -> torch.Tensor:
            self.num_logits += 1
            return logits(hidden)

        self._model.logits = counted  # type: ignore[method-assign]


def _tokens(runner: CountingRunner, sampling: SamplingParams) -> list[list[int]]:
    """The tokens that continue some prompts in one batch."""
    driver = StepDriver(runner)
    for row in range(NUM_ROWS):
        prompt = np.random.default_rng(row).integers(0, VOCAB_SIZE, NUM_PROMPT_TOKENS)
        driver.add(row, [int(token) for token in prompt], sampling=sampling)
    driver.step(dict.fromkeys(range(NUM_ROWS), NUM_PROMPT_TOKENS))
    runner.num_logits = 0
    for _ in range(NUM_STEPS):
        driver.step(dict.fromkeys(range(NUM_ROWS), 1))
    return [driver.rows[row].token_ids[NUM_PROMPT_TOKENS:] for row in range(NUM_ROWS)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("architecture", "is_edited"),
    [("llama", False), ("arcee", False), ("granite", True), ("gemma2", True)],
    ids=["a product", "a product, by transformers", "scaled", "capped"],
)
def test_greedy_rows_get_their_most_likely_tokens(
    checkpoint: Callable[[str], Path], architecture: str, dtype: DTypeName, *, is_edited: bool
) -> None:
    path = checkpoint(architecture)
    told, greedy = (CountingRunner(path, dtype) for _ in range(2))
    expected = _tokens(told, TELLING)
    assert told.num_logits == NUM_STEPS

    assert _tokens(greedy, GREEDY) == expected
    makes_logits = is_edited or not suits_panels(torch.float32 if dtype == "float32" else torch.bfloat16)
    assert greedy.num_logits == (NUM_STEPS if makes_logits else 0)


def test_row_whose_logits_are_no_numbers_fails_alone(checkpoint: Callable[[str], Path]) -> None:
    expected, _ = _second_step(CountingRunner(checkpoint("llama"), "float32"))
    runner = CountingRunner(checkpoint("llama"), "float32")
    forward = runner._model.forward

    def broken(input_ids: torch.Tensor, context: StepContext) -> torch.Tensor:
        hidden = forward(input_ids, context)
        if len(hidden) == 2:  # not of the prompts
            hidden[1] = float("nan")
        return hidden

    runner._model.forward = broken  # type: ignore[method-assign]
    runner._recorded = None
    tokens, output = _second_step(runner)

    assert output.has_nan is not None
    assert output.has_nan.tolist() == [False, True]
    assert tokens[0] == expected[0]


def _second_step(runner: CountingRunner) -> tuple[dict[int, int], ModelRunnerOutput]:
    """A step that decodes two rows, after their prompts."""
    driver = StepDriver(runner)
    for row in range(2):
        driver.add(row, [row + 1] * NUM_PROMPT_TOKENS)
    driver.step({0: NUM_PROMPT_TOKENS, 1: NUM_PROMPT_TOKENS})
    return driver.run({0: 1, 1: 1})
