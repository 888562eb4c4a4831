"""I1 for architectures that differ from Llama: transformers' greedy and seeded tokens."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from engine.build import build_engine
from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.token_ids import TokenIds
from engine.frontend.offline import generate
from tests.support.engine.checkpoints import (
    FAMILIES,
    VOCAB_SIZE,
    load_oracle,
    make_checkpoint,
    oracle_greedy,
    oracle_logits,
)
from tests.support.engine.disaggregated import generate_disaggregated, inproc_pair
from tests.support.engine.engine_config import small_engine_config
from tests.support.engine.requests import greedy_request
from tests.support.engine.sampler_rig import SamplerRig
from tests.support.engine.transformers_families import TRANSFORMERS_FAMILIES

NUM_TOKENS = 24
PROMPT_LENGTHS = (1, 16, 17, 19, 20, 21, 30, 36, 37, 150)
"""Some end at an edge of a block of 16, or of a window of 20, 30 or 36; the last is longer than a chunk."""

SEEDED_LENGTHS = (5, 48)
SAMPLING = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.9, top_p=0.95, seed=11)


def _prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def _requests() -> list[GenerateRequest]:
    greedy = [
        greedy_request(f"greedy {len(prompt)}", prompt, max_tokens=NUM_TOKENS) for prompt in _prompts(PROMPT_LENGTHS)
    ]
    seeded = [
        GenerateRequest(request_id=f"seeded {len(prompt)}", prompt_token_ids=TokenIds.of(prompt), sampling=SAMPLING)
        for prompt in _prompts(SEEDED_LENGTHS)
    ]
    return greedy + seeded


def _drawn_from_the_oracle(oracle: PreTrainedModel, prompt: list[int], output: list[int]) -> list[int]:
    """The tokens that our sampler draws from transformers' logits at each position of an output."""
    logits = oracle_logits(oracle, prompt + output[:-1])[len(prompt) - 1 :]
    rig = SamplerRig()
    rig.set(0, SAMPLING, tuple(prompt), tuple(output))
    places = np.arange(len(prompt), len(prompt) + len(output), dtype=np.int32)
    drawn = rig.sampler.sample(logits, np.zeros(len(output), dtype=np.int32), places)
    return [int(token) for token in drawn.token_ids]


@pytest.mark.parametrize("family", (*FAMILIES, *TRANSFORMERS_FAMILIES))
def test_one_engine_and_two_say_what_transformers_says(tmp_path: Path, family: str) -> None:
    path = make_checkpoint(tmp_path, family)
    config = small_engine_config(path)
    outputs = generate(build_engine(config).core, _requests())

    oracle = load_oracle(path)
    for prompt in _prompts(PROMPT_LENGTHS):
        assert outputs[f"greedy {len(prompt)}"] == oracle_greedy(oracle, prompt, NUM_TOKENS), len(prompt)
    for prompt in _prompts(SEEDED_LENGTHS):
        seeded = outputs[f"seeded {len(prompt)}"]
        assert seeded == _drawn_from_the_oracle(oracle, prompt, seeded), len(prompt)

    with inproc_pair(config) as (prefill, decode):
        assert generate_disaggregated(prefill, decode, _requests()) == outputs
        assert decode.stats().scheduler.remote_hit_tokens > 0
