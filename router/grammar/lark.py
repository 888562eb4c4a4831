"""Pieces of grammar text in llguidance's dialect of Lark, and a grammar put within the rules of another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from router.grammar.grammar_text import GrammarText

TEXT_RULE: Final = "TEXT: /(.|\\n)*/"
"""Any text. Special tokens are no text to a grammar."""


def literal(text: str) -> str:
    """A text that must stand there."""
    return json.dumps(text, ensure_ascii=False)


def around(top: str, inner: Mapping[str, str]) -> GrammarText:
    """A grammar whose rules ``top`` say where ``@name`` stands, which is another grammar, for each name.

    Args:
        top: Lark text with the rule ``start``.
        inner: The other grammars by what ``top`` calls them: Lark text, or llguidance's JSON of several grammars. None
            of their own parts has one of these names.
    """
    grammars: list[Mapping[str, Any]] = [{"lark_grammar": top}]
    for name, text in inner.items():
        parts = json.loads(text)["grammars"] if text.lstrip().startswith("{") else [{"lark_grammar": text}]
        grammars += [{**parts[0], "name": name}, *parts[1:]]
    return GrammarText(tuple(grammars))
