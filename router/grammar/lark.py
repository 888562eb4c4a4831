"""Pieces of grammar text in llguidance's dialect of Lark, and a grammar put within the rules of another."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from router.grammar.grammar_text import GrammarText

TEXT_RULE: Final = "TEXT: /(.|\\n)*/"
"""Any text. Special tokens are no text to a grammar."""


def literal(text: str) -> str:
    """A text that must stand there."""
    return json.dumps(text, ensure_ascii=False)


def around(top: str, name: str, inner: str) -> GrammarText:
    """A grammar whose rules ``top`` say where ``@name`` stands, which is another grammar, in any form.

    Args:
        top: Lark text with the rule ``start``.
        name: What ``top`` calls the other grammar; none of that grammar's own parts has this name.
        inner: Lark text, or llguidance's JSON of several grammars.
    """
    parts: Sequence[Mapping[str, Any]] = [{"lark_grammar": inner}]
    if inner.lstrip().startswith("{"):
        parts = json.loads(inner)["grammars"]
    return GrammarText(({"lark_grammar": top}, {**parts[0], "name": name}, *parts[1:]))
