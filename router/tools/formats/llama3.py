"""``{"name": ..., "parameters": {...}}`` as the whole answer: Llama 3.1 to 3.3."""

from __future__ import annotations

from typing import Any, Final

from router.grammar.lark import literal
from router.tools.call_parser import NAME, CallParser, CallSyntax
from router.tools.lark import FORM, Vocabulary, arguments, arguments_schema, json_term, marker
from router.tools.tool import CallRules, Tool
from router.tools.turn_parser import TurnParser

PYTHON_TAG: Final = "<|python_tag|>"
_HEAD: Final = f'{{ "name" : "{NAME}" , "parameters" : '
_DEFINITIONS: Final = ("$defs", "definitions")
_SYNTAX: Final = CallSyntax(begin=PYTHON_TAG, head=f" {_HEAD}", tail=" }", more=f" ; {_HEAD}", may_begin_answer=True)


class Llama3Format:
    """An answer that begins with a call is nothing but calls, with semicolons between them."""

    name = "llama3"
    markers = (PYTHON_TAG,)

    def is_spoken_by(self, template: str) -> bool:
        """The templates tell the model to write ``parameters``."""
        return '"parameters": ' in template and ("<|python_tag|>" in template or "<|start_header_id|>" in template)

    def grammar(self, rules: CallRules, vocabulary: Vocabulary, *, has_form: bool = False) -> str:
        """See ``ToolFormat``."""
        of_tool = _call_beside_json if has_form else _call
        lines = ["call: " + " | ".join(of_tool(tool) for tool in rules.tools)]
        calls = 'call ("; " call)*' if rules.may_call_many else "call"
        if rules.must_call:
            return "\n".join([f"start: {calls}", *lines])
        begin = marker(PYTHON_TAG, vocabulary)
        if has_form:
            tag = "" if begin == literal(PYTHON_TAG) else f"{begin}?"
            return "\n".join([f"start: {tag} calls | {FORM}", f"calls: {calls}", *lines])
        # A text that begins as a call does would be one.
        plain = r'PLAIN: /(.|\n)*/ & ~/\s*\{\s*"name"(.|\n)*/'
        if begin != literal(PYTHON_TAG):
            return "\n".join([f"start: {begin}? calls | PLAIN", f"calls: {calls}", *lines, plain])
        return "\n".join([f"start: {calls} | PLAIN", *lines, plain])

    def parser(self, rules: CallRules) -> TurnParser:
        """What reads one answer."""
        return CallParser(_SYNTAX, rules.names)


def _call(tool: Tool) -> str:
    head = literal(f'{{"name": "{tool.name}", "parameters": ')
    return f"{head} {arguments(tool)} {literal('}')}"


def _call_beside_json(tool: Tool) -> str:
    """The same as one JSON document: grammars of JSON are cut in pieces other than ``_call``'s, and only what is cut
    alike may begin in the same place.
    """
    schema = arguments_schema(tool)
    shared: dict[str, Any] = {name: schema.pop(name) for name in _DEFINITIONS if name in schema}
    call = {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "parameters": schema},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    return json_term({**call, **shared}, tool)
