"""``{"name": ..., "parameters": {...}}`` as the whole answer: Llama 3.1 to 3.3."""

from __future__ import annotations

from typing import Final

from router.grammar.grammar_text import WHITESPACE
from router.grammar.lark import literal
from router.tools.call_parser import NAME, CallParser, CallSyntax
from router.tools.lark import Vocabulary, arguments, marker
from router.tools.tool import CallRules, Tool
from router.tools.turn_parser import TurnParser

PYTHON_TAG: Final = "<|python_tag|>"
_HEAD: Final = f'{{ "name" : "{NAME}" , "parameters" : '
_SYNTAX: Final = CallSyntax(begin=PYTHON_TAG, head=f" {_HEAD}", tail=" }", more=f" ; {_HEAD}", may_begin_answer=True)


class Llama3Format:
    """An answer that begins with a call consists of calls only, separated by semicolons."""

    name = "llama3"
    markers = (PYTHON_TAG,)
    answer_head = ()

    def is_spoken_by(self, template: str) -> bool:
        """True if the template tells the model to write ``parameters``."""
        return '"parameters": ' in template and ("<|python_tag|>" in template or "<|start_header_id|>" in template)

    def grammar(self, rules: CallRules, vocabulary: Vocabulary) -> str:
        """Lark text of the answers that the rules allow."""
        make = _call_beside_json if rules.has_form else _call
        lines = ["call: " + " | ".join(make(tool) for tool in rules.tools)]
        if rules.has_form:
            lines.append(f"spaces: /{WHITESPACE}/?")
        calls = 'call ("; " call)*' if rules.may_call_many else "call"
        if rules.calls_alone:
            return "\n".join([f"start: {calls}", *lines])
        begin = marker(PYTHON_TAG, vocabulary)
        # Plain text must not begin like a call, or it would be parsed as one.
        plain = r'PLAIN: /(.|\n)*/ & ~/\s*\{\s*"name"(.|\n)*/'
        if begin != literal(PYTHON_TAG):
            return "\n".join([f"start: {begin}? calls | PLAIN", f"calls: {calls}", *lines, plain])
        return "\n".join([f"start: {calls} | PLAIN", *lines, plain])

    def parser(self, rules: CallRules) -> TurnParser:
        """A parser for one answer."""
        return CallParser(_SYNTAX, rules.names)


def _call(tool: Tool) -> str:
    head = literal(f'{{"name": "{tool.name}", "parameters": ')
    return f"{head} {arguments(tool)} {literal('}')}"


def _call_beside_json(tool: Tool) -> str:
    """A call, cut into JSON's lexemes: if two lexemes begin alike, the lexer would see only the longer one."""
    parts = ("{", '"name"', ":", f'"{tool.name}"', ",", '"parameters"', ":")
    return f"{' spaces '.join(map(literal, parts))} spaces {arguments(tool)} spaces {literal('}')}"
