"""Pieces of grammar text in llguidance's dialect of Lark, and grammars nested in the rules of another one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from router.grammar.grammar_text import GrammarText

TEXT_RULE: Final = "TEXT: /(.|\\n)*/"
"""Any text. A grammar does not regard special tokens as text."""


def literal(text: str) -> str:
    """The term for exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def around(top: str, inner: Mapping[str, str]) -> GrammarText:
    """A grammar with the rules ``top``, in which each ``@name`` stands for another grammar.

    Args:
        top: Lark text with the rule ``start``.
        inner: The other grammars by their names in ``top``: Lark text, or llguidance's JSON of several grammars. None
            of their own parts may have one of these names.
    """
    grammars: list[Mapping[str, Any]] = [{"lark_grammar": top}]
    for name, text in inner.items():
        parts = json.loads(text)["grammars"] if text.lstrip().startswith("{") else [{"lark_grammar": text}]
        grammars += [{**parts[0], "name": name}, *parts[1:]]
    return GrammarText(tuple(grammars))
