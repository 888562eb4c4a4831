"""F1: the ways in which a body asks for the shape of its answers, and what is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engine.contract.grammar import GRAMMAR_REFUSED, MAX_GRAMMAR_BYTES
from router.grammar.grammar_text import (
    GrammarText,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
)
from tests.support.router.router_rig import RouterRig, router_rig
from tests.support.router.shared_rig import shared_rig

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED = {"name": "thing", "strict": True, "schema": SCHEMA}
BY_SCHEMA = json_schema_grammar(SCHEMA)
TAG = {"triggers": ["<f"], "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}]}

UNSET = {
    **dict.fromkeys(("json", "regex", "grammar", "whitespace_pattern", "structural_tag"), None),
    **dict.fromkeys(("json_object", "disable_fallback", "disable_any_whitespace"), False),
    **dict.fromkeys(("disable_additional_properties", "_backend_was_auto"), False),
}
"""The other options that ``dataclasses.asdict`` of vLLM's StructuredOutputsParams writes, unset."""


pytestmark = pytest.mark.asyncio(loop_scope="module")
kept, rig = shared_rig()


@pytest_asyncio.fixture(loop_scope="module")
async def own_rig(model_dir: Path) -> AsyncIterator[RouterRig]:
    """One whose workers a test may break."""
    async with router_rig(model_dir) as rig:
        yield rig


ASKED: list[tuple[dict[str, Any], GrammarText | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, json_object_grammar()),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, BY_SCHEMA),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}}, json_object_grammar()),
    ({"structured_outputs": {"json": SCHEMA}}, BY_SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, BY_SCHEMA),
    ({"structured_outputs": {"json_object": True, "regex": None}}, json_object_grammar()),
    ({"structured_outputs": {"json": {}}}, json_schema_grammar({})),
    ({"structured_outputs": {**UNSET, "choice": ["a"]}}, choice_grammar(["a"])),
    ({"structured_outputs": {"regex": "a+"}}, regex_grammar("a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, choice_grammar(["a", "b"])),
    ({"guided_json": SCHEMA, "response_format": {"type": "text"}}, BY_SCHEMA),
    ({"guided_regex": "a+"}, regex_grammar("a+")),
    ({"guided_choice": ["a", "b"]}, choice_grammar(["a", "b"])),
]


@pytest.mark.behaviour("F1")
@pytest.mark.parametrize(("fields", "grammar"), ASKED)
@pytest.mark.parametrize("is_chat", [False, True])
async def test_f1_a_shape_reaches_the_workers(
    rig: RouterRig, fields: dict[str, Any], grammar: GrammarText | None, is_chat: bool
) -> None:
    response = await (rig.chat if is_chat else rig.complete)("hi", max_tokens=3, **fields)

    assert response.status_code == 200, response.text
    assert "X-Baton-Ignored" not in response.headers
    expected = None if grammar is None else grammar.text
    assert {request.sampling.grammar for request in rig.prefill[0].seen} == {expected}


@pytest.mark.behaviour("F1")
@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"grammar": 'start: "a"'}},
        {"guided_grammar": 'root ::= "a" | "b"'},
        {"response_format": {"type": "structural_tag", **TAG}},
        {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
    ],
)
async def test_f1_grammars_and_tags_reach_the_workers(rig: RouterRig, fields: dict[str, Any]) -> None:
    response = await rig.complete("hi", max_tokens=3, **fields)

    assert response.status_code == 200, response.text
    assert all("start:" in (request.sampling.grammar or "") for request in rig.prefill[0].seen)


@pytest.mark.behaviour("F1")
@pytest.mark.parametrize("stream", [False, True])
async def test_f1_what_a_worker_says_of_a_grammar_names_its_parameter(own_rig: RouterRig, stream: bool) -> None:
    own_rig.prefill[0].error_code = GRAMMAR_REFUSED
    text = {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA}}

    for response, param in (
        (await own_rig.complete("hi", stream=stream, structured_outputs={"regex": "a+"}), "structured_outputs.regex"),
        (await own_rig.chat("hi", stream=stream, guided_choice=["a", "b"]), "guided_choice"),
        (
            await own_rig.client.post("/v1/responses", json={"input": "hi", "text": text, "stream": stream}),
            "text.format",
        ),
    ):
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "grammar_refused", param)
        assert error["message"] == f"the parameter '{param}' is invalid: failed by the test"
    counters = own_rig.service.counters
    assert (counters.num_invalid, counters.num_failed) == (3, 0), "it is their callers who were wrong"


LONG_TEXT = "{" + " " * MAX_GRAMMAR_BYTES
"""No JSON: a refusal that says so has parsed it."""

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format", "belong together"),
    ({"response_format": {"type": "json_object", "json_schema": NAMED}}, "response_format", "belong together"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}}, "response_format", "pattern"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "schema": {"not": {}}}}},
        "response_format.json_schema.schema",
        "not",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"json": {}, "json_object": True}}, "structured_outputs", "json, json_object"),
    (
        {"structured_outputs": {"regex": "a", "disable_fallback": True}},
        "structured_outputs.disable_fallback",
        "supported",
    ),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex, choice"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "at least 1"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not valid JSON"),
    ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json", "object"),
    ({"structured_outputs": {"json": LONG_TEXT}}, "structured_outputs.json", "the limit is 262144"),
    ({"structured_outputs": {"structural_tag": LONG_TEXT}}, "structured_outputs.structural_tag", "the limit is 262144"),
    ({"guided_json": LONG_TEXT}, "guided_json", "has 262145 characters"),
    ({"structured_outputs": {"no_such": 1}}, "structured_outputs", "no such field"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "several parameters give"),
    (
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        "guided_regex",
        "response_format, guided_regex",
    ),
    ({"guided_json": {"type": "object", "properties": {"a": {"type": "foo"}}}}, "guided_json", "properties.a"),
    ({"guided_grammar": "start: b"}, "guided_grammar", "unknown name"),
    ({"guided_grammar": "root ::= ("}, "guided_grammar", "GBNF"),
    ({"response_format": {"type": "structural_tag"}}, "response_format", "triggers"),
]


@pytest.mark.behaviour("F1")
@pytest.mark.parametrize(("fields", "param", "word"), REFUSED)
async def test_f1_a_shape_that_cannot_be_is_a_400_that_says_why(
    rig: RouterRig, fields: dict[str, Any], param: str, word: str
) -> None:
    response = await rig.chat("hi", max_tokens=3, **fields)

    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert word in error["message"]
    assert rig.prefill[0].seen == []
