"""Every format of structural tags, alone and nested, compared with texts; errors name the place that is not
supported.
"""

from __future__ import annotations

from typing import Any

import pytest

from router.grammar.structural_tag import structural_tag_grammar
from router.grammar.tag_formats import StructuralTagError
from tests.support.router.turns import GrammarRig

RIG = GrammarRig()
INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY = {"type": "any_text"}
A: dict[str, Any] = {"type": "tag", "begin": "<f=a>", "content": INTEGER, "end": "</f>"}
B: dict[str, Any] = {"begin": "<f=b>", "content": {"type": "regex", "pattern": r"x/\d"}, "end": ["</f>", "</g>"]}
OLDER_A = {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}
TAGS: dict[str, Any] = {"type": "triggered_tags", "triggers": ["<f="], "tags": [A, B]}
LIST: dict[str, Any] = {"type": "tags_with_separator", "tags": [A, B], "separator": ", "}


def const(value: str) -> dict[str, str]:
    return {"type": "const_string", "value": value}


def tag(content: dict[str, Any], end: str = "</t>") -> dict[str, Any]:
    return {"type": "tag", "begin": "<t>", "content": content, "end": end}


@pytest.mark.behaviour("F1")
@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        (const('say "hi"\n'), ['say "hi"\n'], ["", "say"]),
        (INTEGER, ["12"], ["x", ""]),
        ({"type": "regex", "pattern": r"a/b\d"}, ["a/b1"], ["a/b", "ab1"]),
        ({"type": "grammar", "grammar": 'root ::= "yes" | "no"'}, ["yes", "no"], ["maybe"]),
        ({"type": "grammar", "grammar": 'start: "yes" | "no"'}, ["yes"], ["maybe"]),
        (ANY, ["", "all\nof it </t>"], []),
        ({**ANY, "excludes": ["a b", "</t>\n"]}, ["ab", "</t>"], ["x a b y", "</t>\n"]),
        ({**ANY, "max_chars": 3}, ["", "abc"], ["abcd"]),
        ({"type": "sequence", "elements": [const("n="), INTEGER, ANY]}, ["n=5", "n=5 and"], ["5", "n=x"]),
        ({"type": "or", "elements": [const("yes"), A, INTEGER]}, ["yes", "<f=a>5</f>", "7"], ["yes7", "no"]),
        ({"type": "optional", "content": const("x")}, ["", "x"], ["xx"]),
        ({"type": "star", "content": const("x")}, ["", "xxx"], ["y"]),
        ({"type": "plus", "content": const("x")}, ["x", "xxx"], [""]),
        ({"type": "repeat", "min": 2, "max": 3, "content": const("x")}, ["xx", "xxx"], ["x", "xxxx"]),
        ({"type": "repeat", "min": 2, "max": -1, "content": const("x")}, ["xx", "xxxxx"], ["x"]),
        (A, ["<f=a>12</f>"], ["<f=a>x</f>", "<f=a>12", "12"]),
        (B, ["<f=b>x/1</f>", "<f=b>x/1</g>"], ["<f=b>x/1</h>"]),
        (tag(ANY), ["<t></t>", "<t>any <f> text</t>"], ["<t>any", "<t>a</t>b", "<t>a</t></t>"]),
        (tag({**ANY, "max_chars": 2}), ["<t>ab</t>"], ["<t>abc</t>"]),
        (tag(tag(ANY, ""), "</t>"), ["<t><t>x</t>"], ["<t><t>x"]),
        (tag({"type": "or", "elements": [ANY, INTEGER]}), ["<t>x</t>", "<t>1</t>"], ["<t>x"]),
        (TAGS, ["", "hi", "so <f=a>1</f> and <f=b>x/1</g>."], ["<f=c>", "so <f=a>x</f>", "<f=b>x/1</h>"]),
        ({**TAGS, "at_least_one": True}, ["<f=a>1</f> and"], ["", "hi", "so <f=a>1</f>"]),
        ({**TAGS, "stop_after_first": True}, ["so <f=a>1</f>", "hi"], ["<f=a>1</f> and"]),
        ({**TAGS, "at_least_one": True, "stop_after_first": True}, ["<f=b>x/2</f>"], ["", "<f=a>1</f>."]),
        ({**TAGS, "excludes": ["bad"]}, ["good <f=a>1</f> ba"], ["bad", "bad <f=a>1</f>", "<f=a>1</f> bad"]),
        (tag(TAGS), ["<t>hi</t>", "<t>so <f=a>1</f> and</t>"], ["<t>so <f=a>x</f></t>", "<t>hi"]),
        (
            {"type": "sequence", "elements": [tag(ANY), TAGS]},
            ["<t>first</t> then <f=a>1</f>", "<t>first</t>"],
            ["then", "<t>first</t><f=c>"],
        ),
        (LIST, ["", "<f=a>1</f>", "<f=a>1</f>, <f=b>x/1</f>"], ["<f=a>1</f> <f=a>1</f>", "<f=a>1</f>, "]),
        ({**LIST, "at_least_one": True}, ["<f=a>1</f>"], [""]),
        ({**LIST, "stop_after_first": True}, ["", "<f=a>1</f>"], ["<f=a>1</f>, <f=a>1</f>"]),
        ({**LIST, "separator": ""}, ["<f=a>1</f><f=a>2</f>"], ["<f=a>1</f>, <f=a>2</f>"]),
    ],
)
def test_f1_a_format_takes_what_it_should(form: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    grammar = structural_tag_grammar({"type": "structural_tag", "format": {"type": "tag", **form}}).text

    assert [text for text in right if not RIG.allows(grammar, text)] == []
    assert [text for text in wrong if RIG.allows(grammar, text)] == []


@pytest.mark.behaviour("F1")
def test_f1_the_older_form_says_the_same() -> None:
    older = structural_tag_grammar({"triggers": ["<f"], "structures": [OLDER_A]}).text
    newer = structural_tag_grammar({"format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [A]}}).text

    assert older == newer


def nested(depth: int) -> dict[str, Any]:
    return {"type": "optional", "content": nested(depth - 1)} if depth else const("x")


@pytest.mark.behaviour("F1")
@pytest.mark.parametrize(
    ("wish", "word"),
    [
        ({"triggers": [], "structures": [OLDER_A]}, "triggers must be a list of 1 to"),
        ({"triggers": ["<g"], "structures": [OLDER_A]}, "no trigger begins the tag '<f=a>'"),
        ({"triggers": ["<f"], "structures": [{"begin": "<f", "end": ""}]}, "structures.0.schema must be"),
        ({"triggers": ["<f"], "structures": [OLDER_A], "more": 1}, "more is not supported"),
        ({"format": "x"}, "format must be an object"),
        ({"format": {"type": "token_dispatch"}}, "'token_dispatch' is not supported; supported: const_string"),
        ({"format": {"type": "sequence"}}, "format.elements must be a list"),
        ({"format": {"type": "sequence", "elements": [ANY, const("x")]}}, "format.elements.0 has no recognizable end"),
        ({"format": {"type": "star", "content": ANY}}, "format.content has no recognizable end"),
        ({"format": {**ANY, "max_tokens": 3}}, "format.max_tokens is not supported"),
        ({"format": {**ANY, "max_chars": -1}}, "format.max_chars must be 0 to"),
        ({"format": {**ANY, "excludes": [""]}}, "format.excludes must be texts"),
        ({"format": {**INTEGER, "style": "qwen_xml"}}, "format.style is not supported"),
        ({"format": {**INTEGER, "any_order": True}}, "format.any_order is not supported"),
        ({"format": {**A, "begin": {"type": "token", "token": "<f>"}}}, "format.begin must be a text"),
        ({"format": {**A, "end": ["", "x"]}}, "format.end must be a text or texts"),
        ({"format": {**TAGS, "tags": [INTEGER]}}, "format.tags.0 must be a tag"),
        ({"format": {"type": "repeat", "min": 3, "max": 2, "content": A}}, "format: min and max must be"),
        ({"format": nested(40)}, "nested more than 32 deep"),
    ],
)
def test_f1_a_structural_tag_that_is_not_understood_is_named(wish: dict[str, Any], word: str) -> None:
    with pytest.raises(StructuralTagError) as raised:
        structural_tag_grammar(wish)

    assert word in str(raised.value)
