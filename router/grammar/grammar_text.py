"""Grammars as text: from a schema, a regex, choices or Lark to the form that llguidance reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import llguidance

from router.grammar.schema_parts import without_notes

WHITESPACE: Final = r" ?|\n[ \t]{0,64}"
"""What may stand between the parts of a JSON document: nothing, a space, or a new line with its indentation. It is
bounded, so that a model that writes one space after the other comes to an end."""

_JSON_OPTIONS: Final = {"whitespace_pattern": WHITESPACE, "lenient": False}
_OPTIONS_KEY: Final = "x-guidance"
_ASCII_CLASSES: Final = "dws"


@dataclass(frozen=True, slots=True)
class GrammarText:
    """A grammar, not checked yet: ``parts[0]`` is what the text matches, and refers to the others by their names.

    Each part is an object of llguidance: ``{"lark_grammar": text}`` or ``{"json_schema": schema}``.
    ``schema`` is the JSON schema that it was made from, where it was: so that a refusal can name a place in it.
    ``pattern`` is the regex, where it was made from one: a refusal tells of that, and of nothing around it.
    """

    parts: tuple[Mapping[str, object], ...]
    schema: Mapping[str, Any] | bool | None = None
    pattern: str | None = None

    @property
    def text(self) -> str:
        """The grammar as ``SamplingParams.grammar`` takes it."""
        return json.dumps({"grammars": self.parts}, ensure_ascii=False, separators=(",", ":"))


def json_schema_grammar(schema: Mapping[str, Any] | bool) -> GrammarText:
    """A JSON document that fits the schema; its objects have their properties in the schema's order."""
    if isinstance(schema, bool):
        # A schema of its own has no room for options: the one that takes everything is the same as true.
        return GrammarText((_json_part({} if schema else {"not": {}}),), schema)
    return GrammarText((_json_part(schema),), schema)


def json_object_grammar() -> GrammarText:
    """Any JSON object."""
    return GrammarText((_json_part({"type": "object"}),))


def regex_grammar(pattern: str) -> GrammarText:
    r"""A text all of which the pattern matches. ``\d``, ``\w`` and ``\s`` mean ASCII; there is no look-around."""

    return replace(lark_grammar(f"start: /{regex_text(pattern)}/"), pattern=pattern)


def regex_text(pattern: str) -> str:
    """A pattern as it stands between slashes in Lark."""
    return llguidance.regex_to_lark(pattern, _ASCII_CLASSES)


def choice_grammar(choices: Sequence[str]) -> GrammarText:
    """Exactly one of the texts."""
    return lark_grammar("start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))


def lark_grammar(text: str) -> GrammarText:
    """What a grammar in llguidance's dialect of Lark says, beginning with its rule ``start``."""
    return GrammarText(({"lark_grammar": text},))


def _json_part(schema: Mapping[str, Any]) -> dict[str, object]:
    kept = {key: value for key, value in without_notes(schema).items() if key != _OPTIONS_KEY}
    return {"json_schema": {**kept, _OPTIONS_KEY: _JSON_OPTIONS}}
