"""Makes the text that llguidance reads from a schema, a regex, choices, Lark or GBNF."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import llguidance

from engine.contract.grammar import MAX_GRAMMAR_BYTES
from router.grammar.gbnf import GbnfError, MaybeGbnf
from router.grammar.schema_parts import without_notes

WHITESPACE: Final = r" ?|\n[ \t]{0,64}"
"""White space between the parts of a JSON document: none, a space, or a new line with indentation. It is bounded, so
that a model cannot write spaces forever."""

_JSON_OPTIONS: Final = {"whitespace_pattern": WHITESPACE, "lenient": False}
_OPTIONS_KEY: Final = "x-guidance"
_ASCII_CLASSES: Final = "dws"
_GBNF: Final = "gbnf"


@dataclass(frozen=True, slots=True)
class GrammarText:
    """A grammar, not checked yet. The text must match ``parts[0]``, which refers to the other parts by name.

    Each part is an object of llguidance, ``{"lark_grammar": text}`` or ``{"json_schema": schema}``, or becomes one:
    ``{"gbnf": MaybeGbnf}``.
    ``schema`` is the JSON schema that it was made from, if any, so that a refusal can name a place in it. ``pattern``
    is the regex that it was made from, if any, so that a refusal can quote it without the grammar around it.
    """

    parts: tuple[Mapping[str, object], ...]
    schema: Mapping[str, Any] | bool | None = None
    pattern: str | None = None

    @property
    def takes_long(self) -> bool:
        """True if making the text takes too long for the event loop."""
        return any(_GBNF in part for part in self.parts)

    @property
    def text(self) -> str:
        """The grammar as ``SamplingParams.grammar`` takes it.

        Raises:
            GbnfError: A part looks like GBNF and is not valid, or there is too much of it.
        """
        num_characters = sum(len(gbnf.text) for part in self.parts if isinstance(gbnf := part.get(_GBNF), MaybeGbnf))
        if num_characters > MAX_GRAMMAR_BYTES:
            raise GbnfError(f"its GBNF has {num_characters} characters, the limit is {MAX_GRAMMAR_BYTES}")
        parts = [_of_llguidance(part) for part in self.parts]
        return json.dumps({"grammars": parts}, ensure_ascii=False, separators=(",", ":"))


def json_schema_grammar(schema: Mapping[str, Any] | bool) -> GrammarText:
    """A JSON document that fits the schema; its objects have their properties in the schema's order."""
    if isinstance(schema, bool):
        # A boolean schema has no room for options: use the equivalent object instead.
        return GrammarText((_json_part({} if schema else {"not": {}}),), schema)
    return GrammarText((_json_part(schema),), schema)


def json_object_grammar() -> GrammarText:
    """Any JSON object."""
    return GrammarText((_json_part({"type": "object"}),))


def regex_grammar(pattern: str) -> GrammarText:
    r"""A text that the pattern matches as a whole. ``\d``, ``\w`` and ``\s`` mean ASCII; there is no look-around."""

    return replace(lark_grammar(f"start: /{regex_text(pattern)}/"), pattern=pattern)


def regex_text(pattern: str) -> str:
    """A pattern, escaped to stand between slashes in Lark."""
    return llguidance.regex_to_lark(pattern, _ASCII_CLASSES)


def choice_grammar(choices: Sequence[str]) -> GrammarText:
    """Exactly one of the texts."""
    return lark_grammar("start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))


def lark_grammar(text: str) -> GrammarText:
    """A grammar in llguidance's dialect of Lark, which begins with its rule ``start``."""
    return GrammarText(({"lark_grammar": text},))


def grammar_part(text: str, *, place: str = "it") -> dict[str, object]:
    """Make a part of a :class:`GrammarText` from Lark or GBNF; a refusal calls it ``place``."""
    return {_GBNF: MaybeGbnf(text, place)} if "::=" in text else {"lark_grammar": text}


def _of_llguidance(part: Mapping[str, object]) -> dict[str, object]:
    told = dict(part)
    gbnf = told.pop(_GBNF, None)
    return {"lark_grammar": gbnf.as_lark(), **told} if isinstance(gbnf, MaybeGbnf) else told


def _json_part(schema: Mapping[str, Any]) -> dict[str, object]:
    kept = {key: value for key, value in without_notes(schema).items() if key != _OPTIONS_KEY}
    return {"json_schema": {**kept, _OPTIONS_KEY: _JSON_OPTIONS}}
