"""Lark terms that the formats share: markers, and the arguments of a call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, Protocol

from router.grammar.grammar_text import WHITESPACE, GrammarText
from router.grammar.lark import around, literal
from router.grammar.schema_parts import without_notes, without_patterns_beyond_grammars
from router.tools.tool import Tool

_COMPOSED: Final = frozenset({"$ref", "allOf", "anyOf", "oneOf", "patternProperties", "additionalProperties"})


class Vocabulary(Protocol):
    """The part of a tokenizer that grammars need."""

    def added_token_id(self, text: str) -> int | None:
        """The id of the one token that a text always becomes; None if there is none."""


def marker(text: str, vocabulary: Vocabulary) -> str:
    """The term for a format's marker: its token if the model has one, because then the model writes only that."""
    token_id = vocabulary.added_token_id(text)
    return literal(text) if token_id is None else f"<[{token_id}]>"


def text_until(name: str, text: str, vocabulary: Vocabulary) -> str:
    """The rule ``name``: any text up to the first marker, including the marker."""
    is_lazy = "" if vocabulary.added_token_id(text) is not None else "[lazy]"
    return f"{name}{is_lazy}: TEXT {marker(text, vocabulary)}"


def arguments(tool: Tool) -> str:
    """The term for a call's arguments: an object that fits the tool's schema.

    If the schema lists properties, the object has no others, just as a function has no other parameters.
    """
    return f"%json {json.dumps(arguments_schema(tool), ensure_ascii=False)}"


def followed_parameters(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's parameters without keywords that every document satisfies and, unless the tool is strict,
    without regexes that no grammar can follow."""
    schema = without_notes(tool.parameters or {"properties": {}})
    return schema if tool.is_strict else without_patterns_beyond_grammars(schema)


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a call's arguments, in the form that grammars get."""
    schema = followed_parameters(tool)
    schema.setdefault("type", "object")
    if "properties" in schema and _COMPOSED.isdisjoint(schema):
        schema["additionalProperties"] = False
    schema["x-guidance"] = {"whitespace_pattern": WHITESPACE, "lenient": not tool.is_strict}
    return schema


def calls_or_form(calls: str, head: Sequence[str], form: str, vocabulary: Vocabulary) -> GrammarText:
    """The grammar of answers that are either calls, or the ``head`` and then a text of another grammar."""
    begin = " ".join(marker(item, vocabulary) for item in head)
    return around(f"start: @calls | {begin} @form", {"calls": calls, "form": form})
