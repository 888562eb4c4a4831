"""``[TOOL_CALLS]``: a list of JSON objects (until tokenizer version 7), or a name, ``[ARGS]`` and an object a call."""

from __future__ import annotations

import secrets
import string
from typing import Final

from router.grammar.lark import TEXT_RULE, literal
from router.tools.call_parser import NAME, CallParser, CallSyntax
from router.tools.lark import Vocabulary, arguments, marker, text_until
from router.tools.tool import CallRules, Tool
from router.tools.turn_parser import TurnParser

BEGIN: Final = "[TOOL_CALLS]"
ARGS: Final = "[ARGS]"
_HEAD: Final = f'{{ "name" : "{NAME}" , "arguments" : '
_LISTED: Final = CallSyntax(begin=BEGIN, head=f" [ {_HEAD}", tail=" }", more=f" , {_HEAD}", close=" ]")
_NAMED: Final = CallSyntax(begin=BEGIN, head=f" {NAME} {ARGS} ", tail="")
_ID_SIGNS: Final = string.ascii_letters + string.digits


def mistral_call_id() -> str:
    """Nine letters and digits: the templates refuse any other id."""
    return "".join(secrets.choice(_ID_SIGNS) for _ in range(9))


class MistralListFormat:
    """All calls in one list, after any text."""

    name = "mistral"
    markers = (BEGIN,)
    answer_head = ()

    def is_spoken_by(self, template: str) -> bool:
        """True if the template has the marker of calls, but not the newer one of arguments."""
        return BEGIN in template and ARGS not in template

    def grammar(self, rules: CallRules, vocabulary: Vocabulary) -> str:
        """Lark text of the answers that the rules allow."""
        lines = ["call: " + " | ".join(_object(tool) for tool in rules.tools)]
        calls = 'call (", " call)*' if rules.may_call_many else "call"
        lines.append(f'calls: /[ ]?/ "[" {calls} "]"')
        if rules.calls_alone:
            return "\n".join([f"start: {marker(BEGIN, vocabulary)} calls", *lines])
        return "\n".join(["start: begin calls | TEXT", text_until("begin", BEGIN, vocabulary), *lines, TEXT_RULE])

    def parser(self, rules: CallRules) -> TurnParser:
        """What reads one answer."""
        return CallParser(_LISTED, rules.names, make_id=mistral_call_id)


class MistralArgsFormat:
    """A marker for each call, after any text."""

    name = "mistral_args"
    markers = (BEGIN, ARGS)
    answer_head = ()

    def is_spoken_by(self, template: str) -> bool:
        """True if the template has both markers."""
        return BEGIN in template and ARGS in template

    def grammar(self, rules: CallRules, vocabulary: Vocabulary) -> str:
        """Lark text of the answers that the rules allow."""
        args, begin = marker(ARGS, vocabulary), marker(BEGIN, vocabulary)
        lines = ["call: " + " | ".join(f"{literal(tool.name)} {args} {arguments(tool)}" for tool in rules.tools)]
        repeat = f"({begin} call)*" if rules.may_call_many else ""
        if rules.calls_alone:
            return "\n".join([f"start: {begin} call {repeat}", *lines])
        start = f"start: begin call {repeat} | TEXT"
        return "\n".join([start, text_until("begin", BEGIN, vocabulary), *lines, TEXT_RULE])

    def parser(self, rules: CallRules) -> TurnParser:
        """What reads one answer."""
        return CallParser(_NAMED, rules.names, make_id=mistral_call_id)


def _object(tool: Tool) -> str:
    head = literal(f'{{"name": "{tool.name}", "arguments": ')
    return f"{head} {arguments(tool)} {literal('}')}"
