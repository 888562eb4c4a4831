"""Invalid schemas of tools for models with Gemma's notation are refused with their place."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.tools.registry import TOOL_FORMATS
from router.tools.tool import CallRules, Tool
from router.tools.tool_format import ToolSchemaError
from tests.support.router.router_rig import router_rig
from tests.support.router.router_tokenizer import write_model_dir
from tests.support.router.turns import GrammarRig

GEMMA = TOOL_FORMATS["gemma4"]
VOCABULARY = GrammarRig().vocabulary
TEMPLATE = "{{ tools | length }}<|tool_call>{% for m in messages %}{{ m.content }}{% endfor %}"

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"enum": "abc"}, ".enum"),
    ({"enum": 5}, ".enum"),
    ({"enum": []}, ".enum"),
    ({"type": 5}, ".type"),
    ({"type": {}}, ".type"),
    ({"type": []}, ".type"),
    ({"type": [["string"]]}, ".type"),
    ({"type": ["string", None]}, ".type"),
    ({"type": "object", "properties": ["a"]}, ".properties"),
    ({"type": "object", "properties": "a"}, ".properties"),
    ({"type": "object", "properties": {"b": {}}, "required": 5}, ".required"),
    ({"type": "object", "properties": {"b": {}}, "required": "b"}, ".required"),
    ({"type": "object", "properties": {"b": {}}, "required": [["b"]]}, ".required"),
    ({"type": "object", "properties": {"b": 5}}, ".properties.b"),
    ({"type": "object", "additionalProperties": 5}, ".additionalProperties"),
    ({"type": "array", "minItems": "2"}, ".minItems"),
    ({"type": "array", "minItems": -1}, ".minItems"),
    ({"type": "array", "minItems": True}, ".minItems"),
    ({"type": "array", "maxItems": 1.5}, ".maxItems"),
    ({"type": "array", "maxItems": float("inf")}, ".maxItems"),
    ({"type": "array", "items": {"minLength": []}}, ".items.minLength"),
    ({"type": "string", "maxLength": "}/ | /x"}, ".maxLength"),
    ({"type": "string", "pattern": 5}, ".pattern"),
    ({"type": "string", "pattern": ["a"]}, ".pattern"),
    ({"type": "integer", "minimum": "1"}, ".minimum"),
    ({"type": "number", "exclusiveMaximum": True}, ".exclusiveMaximum"),
    ({"anyOf": {"type": "string"}}, ".anyOf"),
    ({"oneOf": []}, ".oneOf"),
    ({"anyOf": [{"type": "string"}, {"type": "array", "maxItems": {}}]}, ".anyOf.1.maxItems"),
    ({"$ref": 5}, ""),
]


def grammar(schema: Any) -> str:
    """The grammar of one tool with one argument."""
    parameters = {"type": "object", "properties": {"a": schema}}
    return GEMMA.grammar(CallRules(tools=(Tool(name="w", parameters=parameters),)), VOCABULARY)


@pytest.mark.parametrize(("schema", "place"), WRONG)
def test_keyword_of_a_wrong_type_is_refused_at_its_place(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(ToolSchemaError) as caught:
        grammar(schema)

    assert (caught.value.tool, caught.value.place) == ("w", f".properties.a{place}")


@pytest.mark.parametrize(
    ("schema", "same"),
    [
        ({"type": "string", "enum": None}, {"type": "string"}),
        ({"type": None, "enum": ["x"]}, {"enum": ["x"]}),
        ({"type": None, "minLength": 2}, {"minLength": 2}),
        ({"type": "array", "items": None, "minItems": None, "maxItems": None}, {"type": "array"}),
        ({"type": "array", "maxItems": 2.0}, {"type": "array", "maxItems": 2}),
        ({"type": "string", "pattern": None, "minLength": None}, {"type": "string"}),
        ({"type": "integer", "minimum": None}, {"type": "integer"}),
        ({"type": "object", "properties": None, "required": None}, {"type": "object"}),
        ({"type": "object", "additionalProperties": None}, {"type": "object"}),
        ({"anyOf": None, "$ref": None, "type": "boolean"}, {"type": "boolean"}),
    ],
)
def test_null_is_as_if_the_keyword_were_not_there(schema: dict[str, Any], same: dict[str, Any]) -> None:
    assert grammar(schema) == grammar(same)


def test_null_as_a_constant_is_a_value() -> None:
    assert grammar({"const": None}) == grammar({"enum": [None]})


def test_references_within_references_are_refused_once_they_are_too_many() -> None:
    parts = {f"p{number}": {"items": {"$ref": f"#/$defs/p{number + 1}"}} for number in range(2000)}
    parameters = {"properties": {"a": {"$ref": "#/$defs/p0"}}, "$defs": {**parts, "p2000": {}}}
    with pytest.raises(ToolSchemaError, match="schemas are nested too deeply"):
        GEMMA.grammar(CallRules(tools=(Tool(name="w", parameters=parameters),)), VOCABULARY)


KEYWORDS = [
    *("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "format", "uniqueItems"),
    *("properties", "required", "additionalProperties", "items", "minItems", "maxItems"),
    *("minLength", "maxLength", "pattern", "minimum", "exclusiveMaximum", "multipleOf"),
]
LEAVES = (
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | st.sampled_from(["string", "array", "#", ""])
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=3),
    max_leaves=12,
)


@given(JSON)
def test_any_schema_makes_a_grammar_or_is_refused(schema: Any) -> None:
    with suppress(ToolSchemaError):
        assert grammar(schema)


async def test_refusal_tells_the_place_in_the_body(tmp_path: Path) -> None:
    path = write_model_dir(tmp_path / "model", config={"chat_template": TEMPLATE})
    parameters = {"type": "object", "properties": {"a": {"type": "string", "enum": 5}}}
    tools = [
        {"type": "function", "function": {"name": "stop"}},
        {"type": "function", "function": {"name": "w", "parameters": parameters}},
    ]
    async with router_rig(path) as rig:
        answer = await rig.chat(tools=tools)

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"] == (
        "the parameter 'tools.1.function.parameters.properties.a.enum' is invalid: 'enum' must be a list of at least "
        "one value, got 5"
    )


def test_a_pattern_that_no_grammar_follows_is_left_out() -> None:
    assert grammar({"type": "string", "pattern": "^(?!x)a"}) == grammar({"type": "string"})
