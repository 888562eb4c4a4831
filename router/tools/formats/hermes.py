"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3, and many others."""

from __future__ import annotations

from typing import Final

from router.grammar.lark import TEXT_RULE, literal
from router.tools.call_parser import NAME, CallParser, CallSyntax
from router.tools.lark import Vocabulary, arguments, marker, text_until
from router.tools.tool import CallRules, Tool
from router.tools.turn_parser import TurnParser

BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"
_SYNTAX: Final = CallSyntax(begin=BEGIN, head=f' {{ "name" : "{NAME}" , "arguments" : ', tail=f" }} {END}")


class HermesFormat:
    """An element with a JSON object for each call, and any text before, between and after them."""

    name = "hermes"
    markers = (BEGIN, END)
    answer_head = ()

    def is_spoken_by(self, template: str) -> bool:
        """True for the element with JSON in it; Qwen 3's coder models put other elements into it."""
        return BEGIN in template and "<function=" not in template

    def grammar(self, rules: CallRules, vocabulary: Vocabulary) -> str:
        """Lark text of the answers that the rules allow."""
        bodies = " | ".join(_body(tool) for tool in rules.tools)
        begin, end = marker(BEGIN, vocabulary), marker(END, vocabulary)
        lines = [f"call: ({bodies}) {end}"]
        if rules.calls_alone:
            repeat = f"(/\\n?/ {begin} call)*" if rules.may_call_many else ""
            return "\n".join([f"start: {begin} call {repeat}", *lines])
        start = "start: (begin call)* TEXT" if rules.may_call_many else "start: begin call | TEXT"
        return "\n".join([start, text_until("begin", BEGIN, vocabulary), *lines, TEXT_RULE])

    def parser(self, rules: CallRules) -> TurnParser:
        """A parser for one answer."""
        return CallParser(_SYNTAX, rules.names)


def _body(tool: Tool) -> str:
    head = literal(f'\n{{"name": "{tool.name}", "arguments": ')
    return f"{head} {arguments(tool)} {literal(chr(125) + chr(10))}"
