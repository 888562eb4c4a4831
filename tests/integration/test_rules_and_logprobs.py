"""I1 with rules, penalties and log-probabilities on: one engine, two, after preemption, after a move."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.build import build_engine
from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.token_ids import TokenIds
from engine.frontend.engine_core import EngineCore
from engine.frontend.offline import generate, run_requests
from tests.support.cluster.served_checkpoint import make_served_checkpoint
from tests.support.engine.checkpoints import VOCAB_SIZE, load_oracle
from tests.support.engine.collected_output import CollectedOutput, collect
from tests.support.engine.disaggregated import inproc_pair, run_disaggregated
from tests.support.engine.engine_config import small_engine_config
from tests.support.engine.requests import greedy_request
from tests.support.engine.sampling_reference import Reference, greedy_reference

NUM_TOKENS = 20
PROMPT_LENGTHS = (1, 17, 48, 90, 129)
TOLERANCE = 2e-4


def sampling(kind: str, expected: Sequence[int]) -> SamplingParams:
    """Parameters that change what a plain greedy request would say (``expected``) from its first token on."""
    common = {"max_tokens": NUM_TOKENS, "num_logprobs": 3, "num_prompt_logprobs": 2}
    favourite = expected[0]
    if kind == "rules":
        return SamplingParams(
            **common,
            logit_bias=((7, 6.5), (favourite, -4.0)),
            # A bad word of two tokens, the first of which was sampled by the prefill worker.
            bad_words=((favourite,), (expected[1],), (7, 7)),
        )
    if kind == "allowed":
        return SamplingParams(
            **common,
            allowed_token_ids=tuple(range(0, 320, 3)),
            bad_words=((0,), (3, 6), (6, 3), (9, 9)),
            repetition_penalty=1.4,
            no_repeat_ngram_size=2,
            min_tokens=8,
            eos_token_ids=(6, 12),
        )
    return SamplingParams(
        **common,
        logit_bias=((5, 3.0), (8, 2.5)),
        bad_words=((favourite,), (5, 8), (8, 5), (5, 5)),
        temperature=1.5,
        top_p=0.97,
        seed=1234,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        ignore_eos=True,
    )


@dataclasses.dataclass(frozen=True)
class World:
    path: Path
    requests: tuple[GenerateRequest, ...]
    references: dict[str, Reference]
    undisturbed: dict[str, CollectedOutput]

    def engine(
        self, *, num_blocks: int | None = None, max_num_batched_tokens: int = 128, async_scheduling: bool = False
    ) -> EngineCore:
        config = small_engine_config(
            self.path,
            num_blocks=num_blocks,
            max_num_batched_tokens=max_num_batched_tokens,
            async_scheduling=async_scheduling,
        )
        scheduler = dataclasses.replace(config.scheduler, max_model_len=160)
        return build_engine(dataclasses.replace(config, scheduler=scheduler)).core


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    path = make_served_checkpoint(tmp_path_factory.mktemp("ruled") / "llama")
    engine = build_engine(small_engine_config(path)).core
    rng = random.Random(5)
    prompts = [tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(length)) for length in PROMPT_LENGTHS]
    plain = generate(engine, [greedy_request(str(place), prompt, max_tokens=2) for place, prompt in enumerate(prompts)])
    requests = tuple(
        GenerateRequest(
            request_id=f"{kind}-{place}",
            prompt_token_ids=TokenIds.of(prompt),
            sampling=sampling(kind, plain[str(place)]),
        )
        for kind in ("rules", "allowed", "random")
        for place, prompt in enumerate(prompts)
    )
    model = load_oracle(path)
    references = {
        request.request_id: greedy_reference(model, request.prompt_token_ids, request.sampling)
        for request in requests
        if request.sampling.is_greedy
    }
    return World(path, requests, references, collect(run_requests(engine, requests)))


def assert_same(actual: CollectedOutput, expected: CollectedOutput) -> None:
    assert actual.token_ids == expected.token_ids
    assert [entry.token_ids[0] for entry in actual.logprobs] == actual.token_ids
    for mine, theirs in zip(actual.logprobs, expected.logprobs, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.rank == theirs.rank
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=TOLERANCE)
    assert actual.prompt is not None
    assert expected.prompt is not None
    np.testing.assert_array_equal(actual.prompt.token_ids, expected.prompt.token_ids)
    np.testing.assert_allclose(actual.prompt.logprobs, expected.prompt.logprobs, atol=TOLERANCE)
    np.testing.assert_array_equal(actual.prompt.ranks, expected.prompt.ranks)


def assert_all_same(actual: dict[str, CollectedOutput], world: World) -> None:
    assert actual.keys() == world.undisturbed.keys()
    for request_id, output in actual.items():
        assert_same(output, world.undisturbed[request_id])


def test_tokens_are_those_of_the_reference(world: World) -> None:
    for request_id, reference in world.references.items():
        tokens = world.undisturbed[request_id].token_ids
        assert tuple(tokens) == reference.token_ids[: len(tokens)], request_id
    assert len(world.references) == 2 * len(PROMPT_LENGTHS)


def test_logprobs_are_the_log_softmax_of_transformers(world: World) -> None:
    for request_id, reference in world.references.items():
        output = world.undisturbed[request_id]
        assert len(output.logprobs) == len(output.token_ids)
        for entry, expected in zip(output.logprobs, reference.logprobs, strict=False):
            best = expected.topk(3)
            assert list(entry.token_ids[1:]) == best.indices.tolist()
            assert entry.logprobs == pytest.approx([expected[token].item() for token in entry.token_ids], abs=TOLERANCE)
            assert entry.rank == int((expected > expected[entry.token_ids[0]]).sum()) + 1


def test_prompt_logprobs_are_the_log_softmax_of_transformers(world: World) -> None:
    prompts = {request.request_id: request.prompt_token_ids for request in world.requests}
    for request_id, reference in world.references.items():
        table, prompt = world.undisturbed[request_id].prompt, prompts[request_id]
        assert table is not None
        assert table.token_ids[:, 0].tolist() == list(prompt[1:])
        if len(prompt) == 1:
            continue
        expected = reference.prompt_logprobs.gather(1, torch.from_numpy(table.token_ids).long())
        np.testing.assert_allclose(table.logprobs, expected, atol=TOLERANCE)
        np.testing.assert_array_equal(table.token_ids[:, 1:], reference.prompt_logprobs.topk(2, dim=1).indices)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_prefill_and_decode_say_the_same(world: World, async_scheduling: bool) -> None:
    config = small_engine_config(world.path, async_scheduling=async_scheduling)
    with inproc_pair(config) as (prefill, decode):
        assert_all_same(collect(run_disaggregated(prefill, decode, world.requests)), world)
        assert (decode.stats().num_waited_steps > 0) == async_scheduling
        assert decode.stats().scheduler.remote_hit_tokens > 0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_small_chunks_and_preemptions_change_nothing(world: World, async_scheduling: bool) -> None:
    engine = world.engine(num_blocks=26, max_num_batched_tokens=48, async_scheduling=async_scheduling)

    assert_all_same(collect(run_requests(engine, world.requests)), world)
    assert engine.stats().scheduler.num_preemptions > 0


def test_a_cached_prompt_is_computed_again_for_its_logprobs(world: World) -> None:
    engine = world.engine()
    collect(run_requests(engine, world.requests))
    hits = engine.stats().scheduler.prefix_hit_tokens

    assert_all_same(collect(run_requests(engine, world.requests)), world)
    assert engine.stats().scheduler.prefix_hit_tokens == hits


@pytest.mark.parametrize("num_sent", [1, 2, 7])
def test_a_request_that_moved_goes_on_with_the_same_tokens(world: World, num_sent: int) -> None:
    moved = [
        dataclasses.replace(request, output_token_ids=tuple(world.undisturbed[request.request_id].token_ids[:num_sent]))
        for request in world.requests
    ]
    outputs = collect(run_requests(world.engine(), moved))

    for request in world.requests:
        expected, actual = world.undisturbed[request.request_id], outputs[request.request_id]
        assert actual.token_ids == expected.token_ids[num_sent:]
        assert [entry.token_ids for entry in actual.logprobs] == [
            entry.token_ids for entry in expected.logprobs[num_sent:]
        ]
        assert actual.prompt is None


def test_a_prompt_of_one_token_has_no_logprobs(world: World) -> None:
    request = GenerateRequest(
        request_id="one",
        prompt_token_ids=TokenIds.of((5,)),
        sampling=SamplingParams(max_tokens=2, num_prompt_logprobs=2),
    )
    output = collect(run_requests(world.engine(), [request]))["one"]

    assert output.prompt is not None
    assert len(output.prompt.ranks) == 0
    assert output.logprobs == []
