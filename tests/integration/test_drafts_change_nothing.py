"""I1 with a real model: tokens, log-probabilities and usage are the same whether steps verify drafts or not, and
whether they decode once or several times."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.build import build_engine
from engine.contract.config import EngineConfig, SpeculativeConfig
from engine.contract.messages import GenerateRequest, SamplingParams, TokenDelta
from engine.contract.token_ids import TokenIds
from engine.drafting.proposer import Draft, DraftContext, Drafting, Proposer
from engine.drafting.registry import make_drafting
from engine.executor.draft_model import DraftModel
from engine.frontend.engine_core import EngineCore
from engine.frontend.offline import generate, run_requests
from tests.support.cluster.served_checkpoint import make_served_checkpoint
from tests.support.engine.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.engine.collected_output import CollectedOutput, collect
from tests.support.engine.disaggregated import inproc_pair, run_disaggregated
from tests.support.engine.engine_config import small_engine_config
from tests.support.engine.proposers import Recorded, RepeatLast, SometimesRight

NUM_TOKENS = 24
PROMPT_LENGTHS = (1, 17, 48, 129)
TOLERANCE = 2e-4
MAX_DRAFT_TOKENS = 5

SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True),
    "logprobs": SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, num_logprobs=2, num_prompt_logprobs=1),
    "repeating": SamplingParams(max_tokens=NUM_TOKENS, logit_bias=((9, 60.0),), num_logprobs=1),
    "wild": SamplingParams(max_tokens=NUM_TOKENS, temperature=1.5, seed=78),
    "random": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, top_p=0.95, top_k=40, seed=77, num_logprobs=0),
    "hot": SamplingParams(max_tokens=NUM_TOKENS, temperature=1.5, min_p=0.01, seed=2**63 + 5),
    "penalties": SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=1.2,
        seed=3,
        presence_penalty=0.7,
        frequency_penalty=0.6,
        repetition_penalty=1.3,
        num_logprobs=3,
        allowed_token_ids=tuple(range(20, 40)),
    ),
    "bad words": SamplingParams(
        max_tokens=NUM_TOKENS,
        min_tokens=10,
        eos_token_ids=(5,),
        logit_bias=((5, 30.0), (7, 31.0), (8, 30.5)),
        bad_words=((7, 7), (7, 8, 7), (8, 8, 8), (8, 5, 8)),
        allowed_token_ids=(5, 7, 8, 9),
    ),
    "stop tokens": SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=1.0,
        seed=11,
        min_tokens=4,
        stop_token_ids=(24, 27),
        allowed_token_ids=tuple(range(20, 30)),
        num_logprobs=1,
    ),
}


Kind = Literal["repeat", "record", "ngram", "suffix", "same model", "other model"]
KINDS: tuple[Kind, ...] = get_args(Kind)
DRAFT_MODELS = ("same model", "other model")


@dataclass(frozen=True)
class Said:
    """All that a request was told."""

    output: CollectedOutput
    last: TokenDelta
    num_deltas: int


def listen(deltas: Iterable[TokenDelta]) -> dict[str, Said]:
    heard: dict[str, list[TokenDelta]] = {}
    for delta in deltas:
        heard.setdefault(delta.request_id, []).append(delta)
    return {name: Said(collect(parts)[name], parts[-1], len(parts)) for name, parts in heard.items()}


@dataclass(frozen=True)
class World:
    path: Path
    other_path: Path
    requests: tuple[GenerateRequest, ...]
    undisturbed: dict[str, Said]
    record: Recorded

    def config(self, kind: Kind, *, block_size: int = 16, num_blocks: int | None = None) -> EngineConfig:
        config = small_engine_config(self.path, block_size=block_size, num_blocks=num_blocks)
        speculative = SpeculativeConfig()
        if kind in DRAFT_MODELS:
            path = self.path if kind == "same model" else self.other_path
            speculative = SpeculativeConfig(method="draft_model", draft_model=path, num_tokens=MAX_DRAFT_TOKENS)
        return replace(config, scheduler=replace(config.scheduler, max_model_len=160), speculative=speculative)

    def engine(self, kind: Kind, *, block_size: int = 16, num_blocks: int | None = None) -> EngineCore:
        config = self.config(kind, block_size=block_size, num_blocks=num_blocks)
        return build_engine(config, drafting=self.drafting(kind)).core

    def drafting(self, kind: Kind) -> Drafting | None:
        if kind in DRAFT_MODELS:
            return None
        if kind == "ngram" or kind == "suffix":
            made = make_drafting(SpeculativeConfig(method=kind, num_tokens=MAX_DRAFT_TOKENS, min_match=1))
            assert made is not None
            return made
        proposer = RepeatLast() if kind == "repeat" else SometimesRight(self.record, probability=0.8)
        return Drafting(proposer=proposer, max_draft_tokens=MAX_DRAFT_TOKENS)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    path = make_served_checkpoint(tmp_path_factory.mktemp("drafted") / "llama")
    rng = random.Random(8)
    prompts = [tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(length)) for length in PROMPT_LENGTHS]
    requests = tuple(
        GenerateRequest(request_id=f"{kind}/{len(prompt)}", prompt_token_ids=TokenIds.of(prompt), sampling=sampling)
        for kind, sampling in SAMPLINGS.items()
        for prompt in prompts
    )
    undisturbed = listen(run_requests(build_engine(small_engine_config(path)).core, requests))
    record = Recorded()
    # As choices of one prompt go on in different ways, what is proposed for one is often what another said.
    for request in requests:
        record.add([*request.prompt_token_ids, *undisturbed[request.request_id].output.token_ids])
    other_path = make_checkpoint(tmp_path_factory.mktemp("draft") / "qwen3", "qwen3", seed=5, num_hidden_layers=1)
    return World(path, other_path, requests, undisturbed, record)


def assert_same(actual: dict[str, Said], world: World) -> None:
    assert actual.keys() == world.undisturbed.keys()
    for request_id, said in actual.items():
        expected = world.undisturbed[request_id]
        assert said.output.token_ids == expected.output.token_ids, request_id
        assert (said.last.finish_reason, said.last.stop_token_id) == (
            expected.last.finish_reason,
            expected.last.stop_token_id,
        )
        assert len(said.output.logprobs) == len(expected.output.logprobs)
        for mine, theirs in zip(said.output.logprobs, expected.output.logprobs, strict=True):
            assert (mine.token_ids, mine.rank) == (theirs.token_ids, theirs.rank)
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=TOLERANCE)
        assert (said.output.prompt is None) == (expected.output.prompt is None)
        if said.output.prompt is not None and expected.output.prompt is not None:
            assert said.output.prompt.token_ids.tolist() == expected.output.prompt.token_ids.tolist()
            assert said.output.prompt.logprobs == pytest.approx(expected.output.prompt.logprobs, abs=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_one_engine_says_the_same_with_drafts(world: World, kind: Kind) -> None:
    engine = world.engine(kind)

    actual = listen(run_requests(engine, world.requests))

    assert_same(actual, world)
    stats = engine.stats().scheduler
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens + (kind == "same model")
    assert stats.num_generated_tokens == sum(len(said.output.token_ids) for said in actual.values())
    assert sum(said.num_deltas for said in actual.values()) < stats.num_generated_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_and_decode_say_the_same_with_drafts(world: World, kind: Kind) -> None:
    with inproc_pair(world.config(kind), drafting=world.drafting(kind)) as (prefill, decode):
        actual = listen(run_disaggregated(prefill, decode, world.requests))

        assert_same(actual, world)
        assert prefill.stats().scheduler.num_draft_tokens == 0, "its part of an output is one token"
        assert decode.stats().scheduler.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("kind", ["record", "same model"])
def test_preempted_requests_say_the_same_with_drafts(world: World, kind: Kind) -> None:
    engine = world.engine(kind, block_size=4, num_blocks=48)

    actual = listen(run_requests(engine, world.requests))

    assert_same(actual, world)
    assert engine.stats().scheduler.num_preemptions > 0


@pytest.mark.parametrize("kind", ["record", "same model"])
def test_a_request_that_moved_with_its_tokens_says_the_same_with_drafts(world: World, kind: Kind) -> None:
    """Another engine continues after some of the tokens; positions count from the prompt's first token everywhere."""
    engine = world.engine(kind)
    moved = [
        replace(request, output_token_ids=tuple(world.undisturbed[request.request_id].output.token_ids[:3]))
        for request in world.requests
        if request.sampling.num_prompt_logprobs is None
    ]

    actual = listen(run_requests(engine, moved))

    for request_id, said in actual.items():
        assert said.output.token_ids == world.undisturbed[request_id].output.token_ids[3:], request_id


def test_a_draft_model_that_is_the_model_is_nearly_always_right(world: World) -> None:
    """At any temperature: both draw the same token at the same place. What it holds is freed at the end."""
    engine = build_engine(world.config("same model"))

    assert_same(listen(run_requests(engine.core, world.requests)), world)

    stats = engine.core.stats().scheduler
    assert stats.num_accepted_draft_tokens > 0.97 * stats.num_draft_tokens
    assert engine.drafting is not None
    model = engine.drafting.model
    assert isinstance(model, DraftModel)
    engine.core.step()  # tells of the last ones that ended
    assert (len(model.rows), model.rows.num_free_blocks) == (0, model.rows.num_blocks)
    model.rows.check_integrity()


@pytest.mark.behaviour("O7")
def test_o7_several_decode_steps_at_once_say_the_same(world: World) -> None:
    config = world.config("repeat")
    scheduler = replace(config.scheduler, max_decode_steps=5, max_num_seqs=64, max_num_batched_tokens=2048)
    config = replace(config, scheduler=scheduler)
    engine = build_engine(config).core

    actual = listen(run_requests(engine, world.requests))

    assert_same(actual, world)
    stats = engine.stats()
    assert stats.scheduler.num_generated_tokens == sum(len(said.output.token_ids) for said in actual.values())
    assert stats.num_steps < NUM_TOKENS / 2


def assert_same_but_for_rounding(actual: Sequence[int], expected: Sequence[int], temperature: float) -> None:
    """The tokens are the same, or a draw fell on the border of two neighbouring tokens, and what follows differs too.

    A step that verifies drafts sums in another order than one that decodes, and a token is drawn by where a random
    number falls among the probabilities in the order of token ids.
    """
    assert len(actual) == len(expected)
    differing = [pair for pair in zip(actual, expected, strict=True) if pair[0] != pair[1]]
    if differing:
        first, other = differing[0]
        assert temperature > 0
        assert abs(first - other) == 1, (first, other)


class Rigged:
    """Implements ``Proposer``: another one for each example."""

    def __init__(self) -> None:
        self.proposer: Proposer = RepeatLast()

    def propose(self, contexts: Sequence[DraftContext]) -> Sequence[Draft]:
        """The drafts of the current proposer, limited to valid tokens."""
        drafts = self.proposer.propose(contexts)
        return [Draft([min(token, VOCAB_SIZE - 1) for token in draft.token_ids]) for draft in drafts]


@pytest.fixture(scope="module")
def rigged(world: World) -> tuple[EngineCore, EngineCore, Rigged]:
    """An engine without drafts, one with them, and who proposes them."""
    proposer = Rigged()
    drafting = Drafting(proposer=proposer, max_draft_tokens=MAX_DRAFT_TOKENS)
    config = small_engine_config(world.path)
    return build_engine(config).core, build_engine(config, drafting=drafting).core, proposer


@pytest.mark.behaviour("F3")
@settings(max_examples=20, deadline=None)
@given(
    probability=st.floats(0.0, 1.0),
    temperatures=st.lists(st.sampled_from([0.0, 0.8, 1.5]), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
)
@example(probability=0.5, temperatures=[0.0, 0.8, 1.5, 0.8], seed=59004)  # on new engines it falls on such a border
def test_f3_drafts_that_are_right_with_any_probability_change_nothing(
    rigged: tuple[EngineCore, EngineCore, Rigged], probability: float, temperatures: list[float], seed: int
) -> None:
    plain, drafted, proposer = rigged
    rng = random.Random(seed)
    requests = [
        GenerateRequest(
            request_id=str(number),
            prompt_token_ids=TokenIds.of([rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 20))]),
            sampling=SamplingParams(
                max_tokens=rng.randint(1, NUM_TOKENS), temperature=temperature, seed=rng.getrandbits(40)
            ),
        )
        for number, temperature in enumerate(temperatures)
    ]
    expected = generate(plain, requests)
    said = {asked.request_id: [*asked.prompt_token_ids, *expected[asked.request_id], 0] for asked in requests}
    proposer.proposer = SometimesRight(
        lambda name, tokens: said[name][min(len(tokens), len(said[name]) - 1)], probability=probability, seed=seed
    )

    for name, tokens in generate(drafted, requests).items():
        assert_same_but_for_rounding(tokens, expected[name], temperatures[int(name)])
