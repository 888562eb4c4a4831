"""F1: grammars made from schemas, regexes and tags, and errors in them, with their places."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel, SecretStr

from engine.contract.grammar import MAX_GRAMMAR_BYTES
from router.errors import InvalidRequestError
from router.grammar.checker import GrammarChecker
from router.grammar.grammar_text import (
    GrammarText,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from router.grammar.structural_tag import structural_tag_grammar
from tests.support.cluster.served_checkpoint import byte_tokenizer
from tests.support.grammar.long_chains import long_chains

TOKENIZER = LLTokenizer(byte_tokenizer().to_str(), eos_token=2)


def fits(grammar: GrammarText, text: str) -> bool:
    """True if the grammar matches the whole text."""
    matcher = LLMatcher(TOKENIZER, grammar.text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = TOKENIZER.tokenize_str(text, parse_special=True)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


class Secrets(BaseModel):
    """Fields whose formats say nothing about their characters."""

    key: SecretStr
    place: Path
    raw: bytes


def of(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


TAG = {"triggers": ["<f"], "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}]}
NEWER_TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f"],
        "tags": [
            {
                "begin": "<f=a>",
                "content": {"type": "json_schema", "json_schema": TAG["structures"][0]["schema"]},  # type: ignore[index]
                "end": "</f>",
            }
        ],
    },
}


@pytest.mark.behaviour("F1")
@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (json_object_grammar(), ['{"a": [1]}', "{}", '{\n  "a": {}\n}'], ["[]", "{", '{"a":        1}']),
        (json_schema_grammar({"type": "integer"}), ["12", "-3"], ["1.5", '"1"']),
        (json_schema_grammar(True), ["12", "null", '{"a": 1}'], ["nil"]),
        (json_schema_grammar({"type": "integer", "x-guidance": {"lenient": True}}), ["1"], ["x"]),
        (regex_grammar(r"a/b|c\d"), ["a/b", "c7"], ["a", "c٣", "a/bc7"]),
        (choice_grammar(["yes", 'a "b"\n', "é"]), ["yes", 'a "b"\n', "é"], ["no", ""]),
        (lark_grammar('start: "a" b\nb: "c"+'), ["acc"], ["a"]),
        (structural_tag_grammar(TAG), ["hi", "so <f=a>12</f> and", ""], ["<f=b>", "<f=a>x</f>"]),
        (structural_tag_grammar(NEWER_TAG), ["so <f=a>12</f> and"], ["<f=a>x</f>"]),
    ],
)
def test_f1_a_grammar_takes_what_it_should(grammar: GrammarText, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not fits(grammar, text)] == []
    assert [text for text in wrong if fits(grammar, text)] == []


@pytest.mark.behaviour("F1")
async def test_f1_notes_that_every_document_satisfies_are_no_fault() -> None:
    """Annotations that pydantic writes for bytes, paths and secrets are removed; names, values and constraints stay."""
    kept = {"format": {"enum": ["path"]}, "uniqueItems": {"const": False}, "date": {"type": "string", "format": "date"}}
    few = {"type": "array", "items": {"type": "integer"}, "maxItems": 1, "uniqueItems": True}
    schema = of({**kept, "few": few, "all": {**few, "maxItems": 2, "uniqueItems": False}})
    schema |= {"$defs": {"f": {"anyOf": [Secrets.model_json_schema(), {"type": "null"}]}}}
    schema["properties"]["f"] = {"$ref": "#/$defs/f"}
    before = deepcopy(schema)
    grammar = json_schema_grammar(schema)
    checker = GrammarChecker()

    await checker.check(grammar, param="x")

    assert schema == before
    document = '{"format": "path", "uniqueItems": false, "date": "2026-01-31", "few": [1], "all": [2, 2], "f": %s}'
    assert fits(grammar, document % '{"key": "k", "place": "/a", "raw": "r"}')
    assert fits(grammar, document % "null")
    assert not fits(grammar, document.replace("2026-01-31", "today") % "null")
    assert not fits(grammar, document.replace('"path"', '"binary"') % "null")
    checker.close()


@pytest.mark.behaviour("F1")
async def test_f1_a_schema_nested_as_deeply_as_a_body_may_be_is_answered() -> None:
    schema: dict[str, Any] = {"type": "string", "format": "path"}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    checker = GrammarChecker()

    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        await checker.check(json_schema_grammar(schema), param="x")

    checker.close()


@pytest.mark.behaviour("F1")
@pytest.mark.parametrize("grammar", [grammar for grammar, _ in long_chains()])
async def test_f1_references_as_long_as_a_grammar_may_be_are_followed(grammar: GrammarText) -> None:
    """One call of the library's for each, in a thread with room for them."""
    checker = GrammarChecker()

    assert await checker.check(grammar, param="x") == grammar.text

    checker.close()


@pytest.mark.behaviour("F1")
@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (of({"a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}}), ".properties.a"),
        (of({"a": {"type": "string", "format": "iri"}}), ".properties.a"),
        (of({"a": of({"b": {"type": "array", "items": {"not": {}}}})}), ".properties.a.properties.b.items"),
        (of({"a": {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "(?=a)"}]}}), ".properties.a.anyOf.1"),
        ({"$defs": {"x": {"type": "foo"}}, **of({"q": {"$ref": "#/$defs/x"}})}, ".$defs.x"),
        (of({"a": {"$ref": "#/$defs/y"}}), ".properties.a"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, ""),
    ],
)
async def test_f1_a_refusal_names_the_place_in_the_schema(schema: dict[str, Any], place: str) -> None:
    checker = GrammarChecker()

    with pytest.raises(InvalidRequestError) as raised:
        await checker.check(json_schema_grammar(schema), param="guided_json")

    assert raised.value.message.startswith(f"the parameter 'guided_json{place}' is invalid: ")
    assert raised.value.param == "guided_json"
    checker.close()


@pytest.mark.behaviour("F1")
@pytest.mark.parametrize(
    ("grammar", "word"),
    [
        (regex_grammar("[a"), r"the regex '\[a' cannot be read: unclosed character class$"),
        (regex_grammar(r"\ba"), "lookarounds.*; leave out"),
        (regex_grammar(r"(?=a)b"), "look-around"),
        (lark_grammar("start: b"), "unknown name"),
        (json_schema_grammar({"const": "x" * MAX_GRAMMAR_BYTES}), f"the limit is {MAX_GRAMMAR_BYTES}"),
        (json_schema_grammar({"const": "\ud800"}), "encoded"),
        (
            json_schema_grammar({"type": "array", "uniqueItems": True}),
            "leave it out.*one boolean for each",
        ),
        (json_schema_grammar({"not": {}}), "leave it out"),
        (json_schema_grammar({"type": "string", "format": "iri"}), "a `pattern`"),
    ],
)
async def test_f1_what_nobody_can_follow_is_refused(grammar: GrammarText, word: str) -> None:
    checker = GrammarChecker()

    with pytest.raises(InvalidRequestError, match=word):
        await checker.check(grammar, param="x")

    checker.close()


@pytest.mark.behaviour("F1")
async def test_f1_a_grammar_is_checked_off_the_event_loop() -> None:
    """While one of many names is checked, the event loop continues."""
    names = {f"k{number}": {"type": "string", "pattern": "^[a-z]{1,9}$"} for number in range(3000)}
    checker = GrammarChecker()
    turns = 0

    checking = asyncio.create_task(checker.check(json_schema_grammar(of(names)), param="x"))
    while not checking.done():
        turns += 1
        await asyncio.sleep(0)

    assert await checking == json_schema_grammar(of(names)).text
    assert turns > 10
    checker.close()


@pytest.mark.behaviour("F1")
async def test_f1_what_was_found_right_is_remembered_without_its_text() -> None:
    """Hundreds of grammars of 256 KiB would else be kept."""
    checker = GrammarChecker()
    grammars = [json_schema_grammar({"const": f"{number}" * 200_000}) for number in range(4)]
    tracemalloc.start()

    for grammar in grammars:
        await checker.check(grammar, param="x")

    gc.collect()
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes < 200_000
    checker.close()
