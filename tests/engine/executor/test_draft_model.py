"""F3: a draft model holds rows and blocks of its own, catches up in chunks, and is never wrong about where it is."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.build import BuiltEngine, build_engine
from engine.contract.config import EngineConfig, SpeculativeConfig
from engine.contract.errors import ConfigError
from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.token_ids import TokenIds
from engine.drafting.proposer import DraftContext
from engine.executor.draft_engine import DraftEngine
from engine.executor.draft_loading import load_draft_model
from engine.executor.draft_model import CATCH_UP_TOKENS, DraftModel
from engine.executor.draft_rows import DraftRow, DraftRows
from engine.frontend.offline import generate
from engine.runner.model_runner import grammar_store
from tests.support.engine.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.engine.engine_config import small_engine_config

LONG = CATCH_UP_TOKENS + 70
MAX_DRAFTS = 4


def config_of(path: Path, draft_path: Path, **speculative: object) -> EngineConfig:
    given: dict[str, object] = {"num_tokens": MAX_DRAFTS, **speculative}
    config = small_engine_config(path, num_blocks=None)
    return replace(
        config,
        scheduler=replace(config.scheduler, max_model_len=512),
        speculative=SpeculativeConfig(method="draft_model", draft_model=draft_path, **given),  # type: ignore[arg-type]
    )


def draft_model(path: Path, draft_path: Path, **speculative: object) -> DraftModel:
    config = config_of(path, draft_path, **speculative)
    engine = DraftEngine.of(config)
    assert engine is not None
    return load_draft_model(engine, grammar_store(config.model))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = np.random.default_rng(seed)
    return [int(token) for token in generator.integers(3, VOCAB_SIZE, length)]


def request(name: str, prompt: list[int], *, max_tokens: int = 20) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=3, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_token_ids=TokenIds.of(prompt), sampling=sampling)


def context(asked: GenerateRequest, tokens: list[int]) -> DraftContext:
    return DraftContext(
        asked.request_id,
        np.array(tokens, np.int32),
        MAX_DRAFTS,
        len(asked.prompt_token_ids),
        sampling=asked.sampling,
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("drafting") / "llama", "llama")


def plain_answers(path: Path, requests: list[GenerateRequest]) -> dict[str, list[int]]:
    config = replace(config_of(path, path), speculative=SpeculativeConfig())
    return generate(build_engine(config).core, requests)


@pytest.mark.behaviour("F3")
def test_f3_drafts_are_what_the_model_would_say_wherever_it_is_asked(path: Path) -> None:
    """Also after tokens that it had not proposed, after a pause, and behind what it had proposed wrongly."""
    asked = [request("a", prompt_of(30)), request("b", prompt_of(7, seed=1))]
    said = plain_answers(path, asked)
    model = draft_model(path, path)

    for num_known in (1, 2, 7, 8, 12, 15):
        drafts = model.propose(
            [context(item, item.prompt_token_ids.tolist() + said[item.request_id][:num_known]) for item in asked]
        )
        for item, draft in zip(asked, drafts, strict=True):
            assert list(draft.token_ids) == said[item.request_id][num_known : num_known + MAX_DRAFTS]


@pytest.mark.behaviour("F3")
def test_f3_a_wrong_token_behind_right_ones_is_noticed(path: Path) -> None:
    asked = request("a", prompt_of(20))
    other = replace(
        asked, prompt_token_ids=TokenIds.of([*asked.prompt_token_ids, *plain_answers(path, [asked])["a"][:2], 9])
    )
    expected = plain_answers(path, [other])["a"]
    model = draft_model(path, path)

    model.propose([context(asked, asked.prompt_token_ids.tolist())])
    (draft,) = model.propose([context(asked, other.prompt_token_ids.tolist())])

    assert list(draft.token_ids) == expected[:MAX_DRAFTS]


@pytest.mark.behaviour("F3")
def test_f3_a_long_prompt_is_caught_up_with_in_chunks_while_others_get_drafts(path: Path) -> None:
    long, short = request("long", prompt_of(LONG)), request("short", prompt_of(5))
    model = draft_model(path, path)

    counts = [
        [
            len(draft.token_ids)
            for draft in model.propose([context(item, item.prompt_token_ids.tolist()) for item in (long, short)])
        ]
        for _ in range(2)
    ]

    assert counts == [[0, MAX_DRAFTS], [MAX_DRAFTS, MAX_DRAFTS]]


@pytest.mark.behaviour("F3")
@pytest.mark.parametrize("cache_tokens", [1, 512, 4096])
def test_f3_requests_for_which_it_has_no_room_get_no_drafts_and_the_same_tokens(path: Path, cache_tokens: int) -> None:
    asked = [request(str(number), prompt_of(40 * number + 1, seed=number)) for number in range(8)]
    built = build_engine(config_of(path, path, draft_cache_tokens=cache_tokens))

    assert generate(built.core, asked) == plain_answers(path, asked)
    assert built.core.stats().scheduler.num_accepted_draft_tokens > 0
    assert_empty(built)


@pytest.mark.behaviour("F3")
@pytest.mark.parametrize("architecture", ["gemma3", "deepseek_v3", "mistral"])
def test_f3_any_model_can_draft(path: Path, tmp_path: Path, architecture: str) -> None:
    """With layers of several kinds, each with block tables of its own, and one that caches latents."""
    draft_path = make_checkpoint(tmp_path / architecture, architecture)
    asked = [request("a", prompt_of(60)), request("b", prompt_of(9))]
    built = build_engine(config_of(path, draft_path, num_tokens="auto"))

    assert generate(built.core, asked) == plain_answers(path, asked)
    assert built.core.stats().scheduler.num_draft_tokens > 0
    assert_empty(built)


def assert_empty(built: BuiltEngine) -> None:
    built.core.step()  # tells of the last ones that ended
    assert built.drafting is not None
    model = built.drafting.model
    assert isinstance(model, DraftModel)
    model.rows.check_integrity()
    assert (len(model.rows), model.rows.num_free_blocks) == (0, model.rows.num_blocks)


@pytest.mark.behaviour("F3")
def test_f3_a_draft_model_of_other_tokens_is_refused_with_both_sizes(path: Path, tmp_path: Path) -> None:
    draft_path = make_checkpoint(tmp_path / "other", "llama", vocab_size=VOCAB_SIZE - 8)

    with pytest.raises(ConfigError, match=f"{VOCAB_SIZE - 8} tokens.*{VOCAB_SIZE}"):
        build_engine(config_of(path, draft_path))


@pytest.mark.behaviour("F3")
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"method": "draft_model"}, "draft_model is not set"),
        ({"method": "ngram", "draft_model": Path("small")}, "'ngram'"),
        ({"draft_cache_tokens": 0}, "draft_cache_tokens"),
    ],
)
def test_f3_settings_of_a_draft_model_that_contradict_each_other_are_refused(
    settings: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        SpeculativeConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.behaviour("F3")
def test_f3_closing_an_engine_frees_its_draft_model(path: Path) -> None:
    built = build_engine(config_of(path, path))
    assert built.drafting is not None
    model = built.drafting.model
    assert isinstance(model, DraftModel)
    runner = weakref.ref(model._runner)

    built.core.close()

    gc.collect()
    assert runner() is None


NAMES = st.sampled_from("abcdef")


@settings(max_examples=150, deadline=None)
@given(
    asks=st.lists(st.tuples(NAMES, st.integers(1, 40), st.booleans()), max_size=30),
    num_blocks=st.sampled_from([4, 9, 30]),
    num_groups=st.sampled_from([1, 2]),
)
@pytest.mark.behaviour("F3")
def test_f3_blocks_of_a_draft_model_are_conserved(
    asks: list[tuple[str, int, bool]], num_blocks: int, num_groups: int
) -> None:
    rows = DraftRows(max_num_seqs=3, num_blocks=num_blocks, num_groups=num_groups, block_size=4)

    for name, num_tokens, ends in asks:
        row = rows.find(name)
        if row is None:
            row = rows.admit(name, num_tokens=num_tokens, keep={name})
            assert (row is None) == (num_groups * -(-num_tokens // 4) > num_blocks)
        else:
            rows.extend(row, num_tokens=num_tokens, keep={name})
        if row is not None:
            assert len({len(block_ids) for block_ids in row.block_ids}) == 1
        if ends:
            rows.forget([name])
        rows.check_integrity()

    rows.forget("abcdef")
    assert (len(rows), rows.num_free_blocks) == (0, num_blocks)


@given(
    known=st.lists(st.integers(0, 2), min_size=1, max_size=6),
    drafts=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    new=st.lists(st.integers(0, 2), min_size=1, max_size=6),
)
@pytest.mark.behaviour("F3")
def test_f3_what_stands_of_a_row_is_what_was_guessed_right(known: list[int], drafts: list[int], new: list[int]) -> None:
    row = DraftRow(0, [[]], num_known=len(known), num_computed=len(known), drafts=list(drafts))
    held, computed = [*known, *drafts], [*known, *drafts[:-1]]
    tokens = [*known, *new]

    num_standing = row.take_in(np.array(tokens, np.int32))

    assert held[:num_standing] == tokens[:num_standing]
    assert computed[: row.num_computed] == tokens[: row.num_computed]
    assert row.num_computed < len(tokens) == row.num_known
    is_longest = num_standing == min(len(held), len(tokens)) or held[num_standing] != tokens[num_standing]
    assert is_longest
