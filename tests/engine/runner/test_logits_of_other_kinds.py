"""Greedy rows take the most likely token also of logits of another dtype than the model, or of a part of others."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from engine.contract.config import CacheConfig, EngineConfig, ModelCode, ModelConfigSource, SchedulerConfig
from engine.contract.messages import SamplingParams
from engine.runner.model_runner import ModelRunner
from tests.support.engine.checkpoints import VOCAB_SIZE, edit_config, load_oracle, make_checkpoint
from tests.support.engine.step_driver import GREEDY, StepDriver

TELLING = SamplingParams(max_tokens=1 << 20, num_logprobs=1)
"""Greedy too, but what it tells is not known to the search for the most likely token."""

NUM_STEPS = 6


def _checkpoint_whose_head_ends(path: Path, ending: str) -> Path:
    """A checkpoint with code of its own, which makes something else of the logits than their product."""
    make_checkpoint(path, "arcee", dtype="bfloat16")
    source = Path(sys.modules[type(load_oracle(path)).__module__].__file__ or "").read_text()
    head = "logits = self.lm_head(hidden_states)"
    assert head in source
    source = source.replace(head, head + ending)
    source = source.replace("from ...", "from transformers.").replace("from .configuration_arcee", "from transformers")
    (path / "modeling_own.py").write_text(source)
    edit_config(path, auto_map={"AutoModelForCausalLM": "modeling_own.ArceeForCausalLM"})
    return path


def _tokens(path: Path, sampling: SamplingParams) -> list[list[int]]:
    """The tokens that continue three prompts in one batch."""
    source = ModelConfigSource(path=path, device="cpu", dtype="bfloat16", code=ModelCode(trust_remote_code=True))
    driver = StepDriver(
        ModelRunner(
            EngineConfig(
                model=source,
                cache=CacheConfig(block_size=16, num_blocks=64),
                scheduler=SchedulerConfig(max_num_seqs=3),
            )
        )
    )
    for row in range(3):
        prompt = np.random.default_rng(row).integers(0, VOCAB_SIZE, 9)
        driver.add(row, [int(token) for token in prompt], sampling=sampling)
    driver.step(dict.fromkeys(range(3), 9))
    for _ in range(NUM_STEPS):
        driver.step(dict.fromkeys(range(3), 1))
    return [driver.rows[row].token_ids[9:] for row in range(3)]


@pytest.mark.parametrize("ending", [".float()", "[..., :-9]", "[..., ::2]"])
def test_greedy_tokens_are_the_most_likely_ones_of_such_logits(tmp_path: Path, ending: str) -> None:
    path = _checkpoint_whose_head_ends(tmp_path / "model", ending)

    assert _tokens(path, GREEDY) == _tokens(path, TELLING)
