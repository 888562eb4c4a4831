"""GBNF, the notation of llama.cpp's grammars and vLLM's EBNF, as llguidance's dialect of Lark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from llguidance.gbnf_to_lark import ASTNode, GrammarParser, RuleNode, RuleRefNode, resolve

_LARK: Final = re.compile(r"^[^\S\n]*(?:%llguidance\b|start\s*:)", re.MULTILINE)
"""How a line of Lark begins. llguidance's own pattern lets the space before it reach over lines, which says the same
and takes time that grows with the square of the empty lines."""


class GbnfError(ValueError):
    """A text reads as GBNF, and is none; the message names its place."""


@dataclass(frozen=True, slots=True)
class MaybeGbnf:
    """A grammar with what GBNF has in each rule, ``::=``, and Lark in a literal at most.

    ``place`` is what a refusal calls it.
    """

    text: str
    place: str = "it"

    def as_lark(self) -> str:
        """The same in Lark, in time that grows with the text alone: up to half a second for 256 KiB.

        Raises:
            GbnfError: It is no GBNF, and no Lark either.
        """
        if _LARK.search(self.text):
            return self.text
        try:
            return _converted(self.text)
        except Exception as error:  # the converter raises whatever its parser does
            raise GbnfError(f"{self.place} reads as GBNF, but is none: {error}") from error


def _converted(text: str) -> str:
    rules = GrammarParser().parse(text)
    in_order = list(rules.values())
    resolve({rule.name: rule for rule in _referred_first(rules)})
    return "\n".join(["%llguidance {}", *map(str, in_order)])


def _referred_first(rules: dict[str, RuleNode]) -> list[RuleNode]:
    """The rules, each behind all that it names.

    llguidance looks through all rules again and again until none turns out to be a terminal any more. In this order it
    knows after the first time: what names itself, through others or not, is none.
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
