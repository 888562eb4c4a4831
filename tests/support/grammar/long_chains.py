"""Grammars of nearly the largest size, in which each part refers to the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from router.grammar.grammar_text import GrammarText, json_schema_grammar, lark_grammar


def long_chains() -> list[tuple[GrammarText, str]]:
    """Objects within objects, lists within lists, patterns and aliases by reference, and rules that name each other.
    Each with how a text that fits begins.
    """
    rules = "".join(f'a{at}: "(" a{at + 1} ")"\n' for at in range(10_000))
    return [
        (_chain(3000, lambda rest: {"type": "object", "properties": {"n": rest}}), '{"n":{"n":{'),
        (_chain(4000, lambda rest: {"type": "array", "prefixItems": [rest]}), "[[["),
        (_chain(3000, lambda rest: {"type": "object", "patternProperties": {"^a$": rest}}), '{"a":{"a":{'),
        (_chain(6000, lambda rest: rest), '"text"'),
        (lark_grammar(f'start: a0\n{rules}a10000: "x"\n'), "((((("),
    ]


def _chain(length: int, link: Callable[[dict[str, Any]], dict[str, Any]]) -> GrammarText:
    definitions = {f"a{at}": link({"$ref": f"#/$defs/a{at + 1}"}) for at in range(length)}
    return json_schema_grammar({"$defs": {**definitions, f"a{length}": {"type": "string"}}, "$ref": "#/$defs/a0"})
