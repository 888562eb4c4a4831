"""A beam search finds what transformers' finds, with the same scores, whoever else is in the batch (O5)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from engine.build import build_engine
from engine.contract.messages import (
    BeamParams,
    BeamResult,
    EarlyStopping,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenDelta,
)
from engine.contract.token_ids import TokenIds
from engine.frontend.engine_core import EngineCore
from engine.frontend.offline import run_requests
from tests.support.engine.checkpoints import load_oracle, make_checkpoint, oracle_greedy
from tests.support.engine.engine_config import small_engine_config

NUM_PROMPTS = 50
VOCAB_SIZE = 128
SETTINGS: list[tuple[int, float, EarlyStopping]] = [
    (width, length_penalty, early_stopping)
    for width in (4, 2, 3)
    for length_penalty in (1.0, 0.0, -1.5, 2.0)
    for early_stopping in (False, True, "never")
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("beams") / "model"
    make_checkpoint(path, "llama", vocab_size=VOCAB_SIZE)
    return path


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> PreTrainedModel:
    return load_oracle(checkpoint)


@pytest.fixture(scope="module")
def core(checkpoint: Path) -> Iterator[EngineCore]:
    built = build_engine(small_engine_config(checkpoint, block_size=4, num_blocks=512))
    yield built.core
    built.core.close()


def found(core: EngineCore, requests: list[GenerateRequest]) -> dict[str, TokenDelta]:
    """The deltas of requests that each say one thing: what their search found."""
    deltas = list(run_requests(core, requests))
    assert len(deltas) == len(requests)
    core.scheduler.check_integrity()
    stats = core.scheduler.stats()
    assert stats.num_free_blocks == stats.num_blocks
    return {delta.request_id: delta for delta in deltas}


def request(number: int, model: PreTrainedModel, **sampling: object) -> GenerateRequest:
    """A request whose end-of-sequence tokens are some that the model is inclined to say soon."""
    generator = np.random.default_rng(number)
    prompt = [int(token) for token in generator.integers(3, VOCAB_SIZE, size=generator.integers(1, 20))]
    width, length_penalty, early_stopping = SETTINGS[number % len(SETTINGS)]
    likely = oracle_greedy(model, prompt, 6)[2:]
    params = SamplingParams(
        max_tokens=int(generator.integers(1, 16)),
        eos_token_ids=tuple(dict.fromkeys(likely[: 1 + number % 3])),
        beams=BeamParams(width=width, num_results=width, length_penalty=length_penalty, early_stopping=early_stopping),
    )
    return GenerateRequest(
        request_id=f"r{number}", prompt_token_ids=TokenIds.of(prompt), sampling=replace(params, **sampling)
    )


def expected(model: PreTrainedModel, asked: GenerateRequest, **options: object) -> list[tuple[list[int], float]]:
    sampling, prompt = asked.sampling, asked.prompt_token_ids.tolist()
    beams = sampling.beams
    assert beams is not None
    eos = set(sampling.eos_token_ids)
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=sampling.max_tokens,
            num_beams=beams.width,
            num_return_sequences=beams.num_results,
            length_penalty=beams.length_penalty,
            early_stopping=beams.early_stopping,
            do_sample=False,
            eos_token_id=list(sampling.eos_token_ids) or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    outputs: list[tuple[list[int], float]] = []
    for row, score in zip(output.sequences.tolist(), output.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        end = next((place + 1 for place, token in enumerate(tokens) if token in eos), len(tokens))
        outputs.append((tokens[:end], score))
    return outputs


def assert_same(beams: tuple[BeamResult, ...], oracle_outputs: list[tuple[list[int], float]]) -> None:
    assert [list(beam.token_ids) for beam in beams] == [tokens for tokens, _ in oracle_outputs]
    assert [beam.score for beam in beams] == pytest.approx([score for _, score in oracle_outputs], rel=1e-5, abs=1e-4)


@pytest.mark.behaviour("O5")
def test_finds_what_transformers_finds(core: EngineCore, oracle: PreTrainedModel) -> None:
    requests = [request(number, oracle) for number in range(NUM_PROMPTS)]

    deltas = found(core, requests)

    reasons = set()
    for asked in requests:
        delta = deltas[asked.request_id]
        assert_same(delta.beams, expected(oracle, asked))
        reasons.add(delta.finish_reason)
        for beam in delta.beams:
            penalty = asked.sampling.beams.length_penalty  # type: ignore[union-attr]
            assert beam.score == pytest.approx(beam.cumulative_logprob / len(beam.token_ids) ** penalty, abs=1e-4)
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}, "some outputs end by themselves, some are cut"


def test_rules_change_log_probabilities_as_in_transformers(core: EngineCore, oracle: PreTrainedModel) -> None:
    requests: list[GenerateRequest] = []
    for number in range(12):
        asked = request(
            number, oracle, repetition_penalty=1.7, logit_bias=((9, 2.5), (10, -3.0)), no_repeat_ngram_size=2
        )
        fewest = min(3, asked.sampling.max_tokens)
        requests.append(replace(asked, sampling=replace(asked.sampling, min_tokens=fewest)))

    deltas = found(core, requests)

    for asked in requests:
        rules = expected(
            oracle,
            asked,
            repetition_penalty=1.7,
            no_repeat_ngram_size=2,
            sequence_bias=[[[9], 2.5], [[10], -3.0]],
            min_new_tokens=asked.sampling.min_tokens,
        )
        assert_same(deltas[asked.request_id].beams, rules)


def test_a_small_pool_costs_time_and_changes_nothing(checkpoint: Path, oracle: PreTrainedModel) -> None:
    """Searches that take each other's blocks, chunks of prompts, and others in the same steps."""
    config = small_engine_config(checkpoint, block_size=4, num_blocks=24, max_num_batched_tokens=24)
    built = build_engine(replace(config, scheduler=replace(config.scheduler, max_model_len=48)))
    searches = [request(number, oracle, max_tokens=16) for number in range(16)]
    others = [
        replace(asked, request_id=f"other-{asked.request_id}", sampling=SamplingParams(max_tokens=9))
        for asked in searches[:6]
    ]

    deltas = list(run_requests(built.core, [*searches[:6], *others, *searches[6:]]))

    assert built.core.scheduler.stats().num_preemptions > 0
    beams = {delta.request_id: delta.beams for delta in deltas if delta.beams}
    for asked in searches:
        assert_same(beams[asked.request_id], expected(oracle, asked))
    built.core.close()
