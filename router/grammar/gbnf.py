"""Converts GBNF, the notation of llama.cpp's grammars and vLLM's EBNF, to llguidance's dialect of Lark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from llguidance.gbnf_to_lark import ASTNode, GrammarParser, RuleNode, RuleRefNode, resolve

_LARK: Final = re.compile(r"^[^\S\n]*(?:%llguidance\b|start\s*:)", re.MULTILINE)
"""Matches the beginning of a line of Lark. llguidance's own pattern lets the leading space span lines: it matches the
same texts, but takes time quadratic in the number of empty lines."""


class GbnfError(ValueError):
    """A text that looks like GBNF is not valid GBNF; the message names its place."""


@dataclass(frozen=True, slots=True)
class MaybeGbnf:
    """A grammar that contains ``::=``, which GBNF has in each rule, and Lark at most in a literal.

    ``place`` is its name in a refusal.
    """

    text: str
    place: str = "it"

    def as_lark(self) -> str:
        """The same grammar in Lark. Takes time linear in the text: up to half a second for 256 KiB.

        Raises:
            GbnfError: The text is neither GBNF nor Lark.
        """
        if _LARK.search(self.text):
            return self.text
        try:
            return _converted(self.text)
        except Exception as error:  # the converter raises whatever its parser does
            raise GbnfError(f"{self.place} looks like GBNF, but is not valid: {error}") from error


def _converted(text: str) -> str:
    rules = GrammarParser().parse(text)
    in_order = list(rules.values())
    resolve({rule.name: rule for rule in _referred_first(rules)})
    return "\n".join(["%llguidance {}", *map(str, in_order)])


def _referred_first(rules: dict[str, RuleNode]) -> list[RuleNode]:
    """The rules, each after all rules that it refers to.

    llguidance scans all rules repeatedly, until a scan finds no more terminals. In this order one scan is enough: a
    rule that refers to itself, directly or through others, is never a terminal.
    """
    placed: dict[str, RuleNode] = {}
    begun: set[str] = set()
    for first in rules:
        names = [first]
        while names:
            name = names[-1]
            if name in begun or name not in rules:
                names.pop()
                if name in rules:
                    placed.setdefault(name, rules[name])
                continue
            begun.add(name)
            names += _references(rules[name])
    return list(placed.values())


def _references(rule: RuleNode) -> Iterator[str]:
    nodes: list[ASTNode] = [rule]
    while nodes:
        node = nodes.pop()
        if isinstance(node, RuleRefNode):
            yield node.name
        nodes += node.children()
