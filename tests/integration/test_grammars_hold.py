"""F1: a random model's output under a grammar matches it, for random schemas and regexes, at high temperatures.

`BATON_GRAMMARS=1000 make test TESTS=tests/integration/test_grammars_hold.py` asks so many schemas, and 3 in 10 as many
regexes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from engine.build import build_engine
from engine.contract.messages import FinishReason, GenerateRequest, SamplingParams
from engine.contract.token_ids import TokenIds
from engine.frontend.engine_core import EngineCore
from engine.frontend.offline import run_requests
from router.grammar.checker import find_problem
from router.grammar.grammar_text import GrammarText, json_schema_grammar, regex_grammar
from router.text.tokenizer import Tokenizer
from tests.support.cluster.served_checkpoint import make_served_checkpoint
from tests.support.engine.engine_config import small_engine_config
from tests.support.engine.proposers import repeat_last
from tests.support.grammar.random_grammars import json_schemas, regexes

NUM_SCHEMAS = int(os.environ.get("BATON_GRAMMARS", "20"))
BATCH = 10
TEMPERATURES = (1.0, 2.0)
MAX_TOKENS = 80
END = 2

MANY = settings(
    max_examples=max(NUM_SCHEMAS // BATCH, 1),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=[Phase.generate],
)
FEWER = settings(MANY, max_examples=max(NUM_SCHEMAS * 3 // 10 // BATCH, 1))


@dataclass(frozen=True, slots=True)
class Said:
    """An output: its whole text, and why it ended."""

    text: str
    reason: FinishReason | None
    error: str


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_served_checkpoint(tmp_path_factory.mktemp("grammars") / "model", vocab_size=300)


@pytest.fixture(scope="module")
def core(path: Path) -> EngineCore:
    config = small_engine_config(path, max_num_batched_tokens=256)
    return build_engine(replace(config, scheduler=replace(config.scheduler, max_num_seqs=32))).core


@pytest.fixture(scope="module")
def drafting_core(path: Path) -> EngineCore:
    return build_engine(small_engine_config(path, max_num_batched_tokens=256), drafting=repeat_last(3)).core


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.load(path)


def say(core: EngineCore, tokenizer: Tokenizer, grammars: Sequence[GrammarText]) -> list[tuple[int, Said]]:
    """The outputs of the model under each grammar at each temperature, with the grammar's number."""
    requests = {
        f"{number} at {temperature}": (number, request(grammar, temperature, seed=number))
        for number, grammar in enumerate(grammars)
        for temperature in TEMPERATURES
    }
    requests = {name: (number, replace(asked, request_id=name)) for name, (number, asked) in requests.items()}
    tokens: dict[str, list[int]] = {name: [] for name in requests}
    ends: dict[str, tuple[FinishReason, str]] = {}
    for delta in run_requests(core, [asked for _, asked in requests.values()]):
        tokens[delta.request_id] += delta.token_ids
        if delta.finish_reason is not None:
            ends[delta.request_id] = delta.finish_reason, delta.error.message if delta.error else ""
    return [(requests[name][0], Said(tokenizer.decode(ids), *ends[name])) for name, ids in tokens.items()]


def request(grammar: GrammarText, temperature: float, *, seed: int) -> GenerateRequest:
    return GenerateRequest(
        request_id="",
        prompt_token_ids=TokenIds.of([seed + 3, 77, 80]),
        sampling=SamplingParams(
            max_tokens=MAX_TOKENS, temperature=temperature, seed=seed, eos_token_ids=(END,), grammar=grammar.text
        ),
    )


def check_reason(said: Said, what: object) -> None:
    assert said.reason in (FinishReason.STOP, FinishReason.LENGTH), (what, said)


@pytest.mark.behaviour("F1")
@MANY
@given(schemas=st.lists(json_schemas(), min_size=BATCH, max_size=BATCH))
def test_f1_a_random_model_says_what_its_schema_allows(
    core: EngineCore, tokenizer: Tokenizer, schemas: list[dict[str, Any]]
) -> None:
    grammars = [json_schema_grammar(schema) for schema in schemas]
    problems = [find_problem(grammar, grammar.text) for grammar in grammars]
    kept = [index for index, problem in enumerate(problems) if problem is None]

    for number, said in say(core, tokenizer, [grammars[index] for index in kept]):
        check_schema(said, schemas[kept[number]])


def check_schema(said: Said, schema: Mapping[str, Any]) -> None:
    check_reason(said, schema)
    if said.reason is FinishReason.STOP:
        try:
            jsonschema.Draft202012Validator(schema).validate(json.loads(said.text))
        except Exception as error:
            raise AssertionError((schema, said)) from error


@pytest.mark.behaviour("F1")
@FEWER
@given(patterns=st.lists(regexes(), min_size=BATCH, max_size=BATCH))
def test_f1_a_random_model_says_what_its_regex_allows(
    core: EngineCore, tokenizer: Tokenizer, patterns: list[str]
) -> None:
    for number, said in say(core, tokenizer, [regex_grammar(pattern) for pattern in patterns]):
        check_reason(said, patterns[number])
        if said.reason is FinishReason.STOP:
            assert re.fullmatch(patterns[number], said.text), (patterns[number], said)


@pytest.mark.behaviour("F1")
@settings(MANY, max_examples=1)
@given(schemas=st.lists(json_schemas(), min_size=5, max_size=5))
def test_f1_drafts_change_nothing_under_a_grammar(
    core: EngineCore, drafting_core: EngineCore, tokenizer: Tokenizer, schemas: list[dict[str, Any]]
) -> None:
    grammars = [json_schema_grammar(schema) for schema in schemas]
    kept = [grammar for grammar in grammars if find_problem(grammar, grammar.text) is None]

    assert say(drafting_core, tokenizer, kept) == say(core, tokenizer, kept)


@pytest.mark.behaviour("F1")
@pytest.mark.parametrize(("predicted", "has_drafts"), [("z" * 40, False), ("abz" * 20, True), ("ab" * 30, True)])
def test_f1_drafts_that_do_not_fit_a_grammar_are_not_computed(
    core: EngineCore, tokenizer: Tokenizer, predicted: str, has_drafts: bool
) -> None:
    """A caller's prediction is followed as far as the grammar allows it."""
    asked = replace(request(regex_grammar("(ab){20}"), 1.0, seed=1), request_id="a")
    (prediction,) = tokenizer.encode_all([predicted], add_special_tokens=False)
    before = core.stats().scheduler

    plain = list(run_requests(core, [asked]))
    told = list(run_requests(core, [replace(asked, prediction_token_ids=TokenIds.of(prediction))]))

    counted = core.stats().scheduler
    assert [token for delta in told for token in delta.token_ids] == [
        token for delta in plain for token in delta.token_ids
    ]
    num_drafts = counted.num_draft_tokens - before.num_draft_tokens
    num_accepted = counted.num_accepted_draft_tokens - before.num_accepted_draft_tokens
    assert (num_drafts > 0) == has_drafts
    assert num_accepted >= num_drafts - 1, "there is one text that fits"
