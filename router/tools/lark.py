"""Pieces of grammar text in llguidance's dialect of Lark, and an answer's grammar put behind what comes before it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from router.tools.tool import Tool

WHITESPACE: Final = r"[ \t]?|\n[ \t]{0,64}"
"""What may stand between the parts of a JSON document. It is bounded, so that a model that writes one space after the
other comes to an end."""

TEXT_RULE: Final = "TEXT: /(.|\\n)*/"
"""Any text. Special tokens are no text to a grammar."""

_COMPOSED: Final = frozenset({"$ref", "allOf", "anyOf", "oneOf", "patternProperties", "additionalProperties"})


class Vocabulary(Protocol):
    """The part of a tokenizer that grammars ask."""

    def added_token_id(self, text: str) -> int | None:
        """The id of the one token that a text always becomes; None where there is none."""


def literal(text: str) -> str:
    """A text that must stand there."""
    return json.dumps(text, ensure_ascii=False)


def marker(text: str, vocabulary: Vocabulary) -> str:
    """A marker of a format: its token where the model has one, which alone is how such models write it."""
    token_id = vocabulary.added_token_id(text)
    return literal(text) if token_id is None else f"<[{token_id}]>"


def text_until(name: str, text: str, vocabulary: Vocabulary) -> str:
    """The rule ``name``: any text up to the first marker, and the marker."""
    is_lazy = "" if vocabulary.added_token_id(text) is not None else "[lazy]"
    return f"{name}{is_lazy}: TEXT {marker(text, vocabulary)}"


def arguments(tool: Tool) -> str:
    """The term for a call's arguments: an object that fits the tool's schema.

    An object of a schema that lists its properties has no others, as a function has no other parameters.
    """
    return f"%json {json.dumps(arguments_schema(tool), ensure_ascii=False)}"


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a call's arguments, as grammars are told it."""
    schema: dict[str, Any] = dict(tool.parameters or {"properties": {}})
    schema.setdefault("type", "object")
    if "properties" in schema and _COMPOSED.isdisjoint(schema):
        schema["additionalProperties"] = False
    schema["x-guidance"] = {"whitespace_pattern": WHITESPACE, "lenient": not tool.is_strict}
    return schema


def calls_or_form(calls: str, head: Sequence[str], form: str, vocabulary: Vocabulary) -> str:
    """The grammar of answers that are calls, or markers and then what another grammar, in any form, says."""
    begin = " ".join(marker(item, vocabulary) for item in head)
    top = {"lark_grammar": f"start: @calls | {begin} @form"}
    return _joined([top, {"name": "calls", "lark_grammar": calls}], "form", form)


def behind(top: str, answer: str) -> str:
    """A grammar whose rules ``top`` say where ``@answer`` stands, which is another grammar, in any form.

    Args:
        top: Lark text with the rule ``start``.
        answer: Lark text, or llguidance's JSON of several grammars.
    """
    return _joined([{"lark_grammar": top}], "answer", answer)


def _joined(first: Sequence[Mapping[str, Any]], name: str, last: str) -> str:
    """Grammars, and behind them under that name another one, in any form."""
    parts: Sequence[Mapping[str, Any]] = [{"lark_grammar": last}]
    if last.lstrip().startswith("{"):
        parts = json.loads(last)["grammars"]
    grammars = [*first, {**parts[0], "name": name}, *parts[1:]]
    return json.dumps({"grammars": grammars}, ensure_ascii=False, separators=(",", ":"))
