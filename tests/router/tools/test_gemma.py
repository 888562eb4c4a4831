"""Gemma's notation of arguments: what its templates write is read as the same JSON, and grammars enforce
schemas in it.
"""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.tools.formats.gemma import GemmaFormat
from router.tools.reasoning import REASONING_FORMATS, AnswerGrammar, Opening
from router.tools.registry import TOOL_FORMATS
from router.tools.tool import CallRules, Tool
from router.tools.tool_format import ToolSchemaError
from tests.support.router.turns import ANY, STOP, GrammarRig, cut, plain, read

FORMATS = [item for item in TOOL_FORMATS.values() if isinstance(item, GemmaFormat)]
NOTATION = """
{%- macro value(item) -%}
  {%- if item is none -%}null{%- elif item is string -%}{{ quote + item + quote }}
  {%- elif item is boolean -%}{{ 'true' if item else 'false' }}
  {%- elif item is mapping -%}
    { {%- for name, part in item | dictsort -%}
      {{ name }}:{{ value(part) }}{%- if not loop.last -%},{%- endif -%}
    {%- endfor -%} }
  {%- elif item is sequence -%}
    [ {%- for part in item -%}{{ value(part) }}{%- if not loop.last -%},{%- endif -%}{%- endfor -%} ]
  {%- else -%}{{ item }}{%- endif -%}
{%- endmacro -%}
{{ begin }}call:{{ name }}{{ value(arguments) }}{{ end }}"""
"""How the templates of these models write the calls of earlier turns."""

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "Zed": {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1, "maxItems": 2},
        "any": {},
        "code": {"type": "string", "pattern": "^a+$"},
        "kind": {"enum": ["x", "yy", 3]},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "short": {"type": "string", "minLength": 1, "maxLength": 3},
        "tree": {"$ref": "#/$defs/tree"},
    },
    "required": ["kind"],
    "$defs": {"tree": {"type": "object", "properties": {"leaves": {"items": {"$ref": "#/$defs/tree"}}}}},
}
RULES = CallRules(tools=(Tool(name="w", parameters=SCHEMA), STOP), must_call=True)
FIT: list[dict[str, Any]] = [
    {"kind": "x"},
    {"kind": 3, "maybe": "any { thing, at: all", "short": "é'\""},
    {"kind": 3, "maybe": None, "any": {"k": [1.5, True, "z", {}]}},
    {"kind": "yy", "Zed": [1, 2], "code": "aaa", "tree": {"leaves": [{"leaves": []}, {}]}},
]
UNFIT: list[dict[str, Any]] = [
    {},
    {"kind": "z"},
    {"maybe": "x"},
    {"kind": 3, "Zed": []},
    {"kind": 3, "Zed": [1, 2, 3]},
    {"kind": 3, "Zed": [0]},
    {"kind": 3, "code": "b"},
    {"kind": 3, "short": "long"},
    {"kind": 3, "more": 1},
    {"kind": 3, "tree": {"leaves": [1]}},
]
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=8)
KEYS = st.from_regex(r"[a-z_]{1,5}", fullmatch=True)
NUMBERS = st.integers(-(10**6), 10**6) | st.floats(-100, 100).map(lambda number: round(number, 3))
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


def written(form: GemmaFormat, name: str, arguments: dict[str, Any]) -> str:
    template = jinja2.Environment().from_string(NOTATION)
    return template.render(name=name, arguments=arguments, begin=form.begin, end=form.end, quote=form.quote)


@pytest.fixture(params=FORMATS, ids=lambda item: item.name)
def form(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=["special tokens", "added tokens", "plain text"])
def rig(request: pytest.FixtureRequest, form: GemmaFormat) -> GrammarRig:
    match request.param:
        case "special tokens":
            return GrammarRig(special=form.markers)
        case "added tokens":
            return GrammarRig(added=form.markers)
        case _:
            return GrammarRig()


@given(
    form=st.sampled_from(FORMATS),
    arguments=st.dictionaries(KEYS, VALUES, max_size=4),
    places=st.lists(st.integers(0, 80), max_size=8),
)
def test_calls_of_templates_are_read_however_they_are_cut(
    form: GemmaFormat, arguments: dict[str, Any], places: list[int]
) -> None:
    text = written(form, "get_weather", arguments)
    for pieces in ([text], list(text), cut(text, places)):
        turn = read(form.parser(ANY), pieces)
        assert turn.content == ""
        [call] = turn.calls
        assert (call.name, json.loads(call.arguments)) == ("get_weather", arguments)


def test_text_and_several_calls(form: GemmaFormat) -> None:
    calls = [written(form, "stop", {}), written(form, "get_weather", {"city": "Paris"})]
    expected = ("", "Let me see.", [("stop", "{}"), ("get_weather", '{"city":"Paris"}')])

    for pieces in (["Let me see.", *calls], "Let me see." + "".join(calls)):
        assert plain(read(form.parser(ANY), pieces)) == expected
    unknown = written(form, "unknown", {"a": "b"})
    assert plain(read(form.parser(ANY), unknown)) == ("", unknown, [])


def test_unfinished_arguments_are_as_far_as_they_came(form: GemmaFormat) -> None:
    text = written(form, "get_weather", {"city": "Paris", "days": 2})
    [call] = read(form.parser(ANY), text[: text.index("ris")]).calls

    assert call.arguments == '{"city":"Pa'


def test_grammar_holds_calls_to_their_schema(form: GemmaFormat, rig: GrammarRig) -> None:
    grammar = form.grammar(RULES, rig.vocabulary)

    for arguments in FIT:
        assert rig.allows(grammar, written(form, "w", arguments)), arguments
    for arguments in UNFIT:
        assert not rig.allows(grammar, written(form, "w", arguments)), arguments
    assert rig.allows(grammar, written(form, "stop", {}) + written(form, "w", {"kind": 3}))
    assert not rig.allows(grammar, written(form, "stop", {"x": 1}))
    assert not rig.allows(grammar, "No call.")


def test_free_answers_have_calls_that_fit(form: GemmaFormat, rig: GrammarRig) -> None:
    grammar = form.grammar(CallRules(tools=RULES.tools), rig.vocabulary)

    assert rig.allows(grammar, "It is 5 < 7.")
    assert rig.allows(grammar, f"So: {written(form, 'w', {'kind': 3})}")
    assert not rig.allows(grammar, f"So: {written(form, 'w', {'kind': 4})}")


def test_calls_stand_behind_thinking() -> None:
    form, thinking = TOOL_FORMATS["gemma4"], REASONING_FORMATS["gemma4"]
    assert isinstance(form, GemmaFormat)
    for rig in (GrammarRig(special=(*form.markers, *thinking.markers)), GrammarRig()):
        answer = AnswerGrammar(text=form.grammar(RULES, rig.vocabulary), names_channel=True)
        grammar = thinking.grammar(answer, rig.vocabulary, opening=Opening.FREE, max_thinking_tokens=None)
        call = written(form, "w", {"kind": 3})

        assert rig.allows(grammar, call)
        assert rig.allows(grammar, f"<|channel>thought\nThe kind is 3.<channel|>{call}")
        assert not rig.allows(grammar, "<|channel>thought\nNone.<channel|>No call.")


def test_a_strict_tool_may_say_what_every_text_is(form: GemmaFormat) -> None:
    noted, plain_text = ({"properties": {"a": {"type": "string", **more}}} for more in ({"format": "path"}, {}))
    texts = [
        form.grammar(CallRules(tools=(Tool(name="w", parameters=schema, is_strict=True),)), GrammarRig().vocabulary)
        for schema in (noted, plain_text)
    ]

    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("parameters", "is_strict", "place", "words"),
    [
        ({"properties": {"a b": {}}}, False, ".properties.a b", "'a b'"),
        ({"properties": {"a": {"type": "str"}}}, False, ".properties.a", "no type 'str'"),
        ({"properties": {"a": {"$ref": "#/$defs/no"}}}, False, ".properties.a", "'#/$defs/no'"),
        ({"properties": {"a": False}}, False, ".properties.a", "False"),
        ({"properties": {"a": {"type": "string", "format": "date"}}}, True, ".properties.a", "'format'"),
        ({"allOf": [{"type": "object"}, {"type": "object"}]}, False, "", "allOf"),
    ],
)
def test_what_cannot_be_followed_is_refused_at_its_place(
    form: GemmaFormat, parameters: dict[str, Any], is_strict: bool, place: str, words: str
) -> None:
    rules = CallRules(tools=(Tool(name="w", parameters=parameters, is_strict=is_strict),))
    with pytest.raises(ToolSchemaError) as caught:
        form.grammar(rules, GrammarRig().vocabulary)

    assert (caught.value.tool, caught.value.place) == ("w", place)
    assert words in caught.value.reason
