"""The terms of Lark that formats of turns share: their markers, and the arguments of a call."""

from __future__ import annotations

import json
from typing import Any, Final, Protocol

from router.grammar.grammar_text import WHITESPACE
from router.grammar.lark import literal
from router.tools.tool import Tool

FORM: Final = "@form"
"""Where an answer of a given form stands, which is a grammar of its own."""

_COMPOSED: Final = frozenset({"$ref", "allOf", "anyOf", "oneOf", "patternProperties", "additionalProperties"})


class Vocabulary(Protocol):
    """The part of a tokenizer that grammars ask."""

    def added_token_id(self, text: str) -> int | None:
        """The id of the one token that a text always becomes; None where there is none."""


def marker(text: str, vocabulary: Vocabulary) -> str:
    """A marker of a format: its token where the model has one, which alone is how such models write it."""
    token_id = vocabulary.added_token_id(text)
    return literal(text) if token_id is None else f"<[{token_id}]>"


def text_until(name: str, text: str, vocabulary: Vocabulary) -> str:
    """The rule ``name``: any text up to the first marker, and the marker."""
    is_lazy = "" if vocabulary.added_token_id(text) is not None else "[lazy]"
    return f"{name}{is_lazy}: TEXT {marker(text, vocabulary)}"


def arguments(tool: Tool) -> str:
    """The term for a call's arguments: an object that fits the tool's schema."""
    return json_term(arguments_schema(tool), tool)


def json_term(schema: dict[str, Any], tool: Tool) -> str:
    """The term for a JSON document of a call of this tool."""
    options = {"whitespace_pattern": WHITESPACE, "lenient": not tool.is_strict}
    return f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}"


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a call's arguments.

    An object of a schema that lists its properties has no others, as a function has no other parameters.
    """
    schema: dict[str, Any] = dict(tool.parameters or {"properties": {}})
    schema.setdefault("type", "object")
    if "properties" in schema and _COMPOSED.isdisjoint(schema):
        schema["additionalProperties"] = False
    return schema
