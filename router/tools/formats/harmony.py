"""Harmony, the format of gpt-oss: messages on channels, with one channel each for thinking, calls and the answer."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Final

from router.grammar.lark import TEXT_RULE, literal
from router.tools.lark import Vocabulary, arguments, marker
from router.tools.tool import CallRules, Tool, new_call_id
from router.tools.turn import CallArguments, CallBegin, ContentText, ReasoningText, TurnPart
from router.tools.turn_parser import TurnParser, num_held

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_ENDS: Final = (END, CALL, RETURN, START)
_RECIPIENT: Final = re.compile(r"to=functions\.([A-Za-z0-9_.-]+)")
_RECIPIENT_FIRST: Final = " to=functions."
_CHANNEL_NAME: Final = re.compile(re.escape(CHANNEL) + r"\s*([a-z]+)")


class HarmonyFormat:
    """A call ends its message, so an answer makes at most one call."""

    name = "harmony"
    markers = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
    answer_head = (CHANNEL, "final", MESSAGE)

    def is_spoken_by(self, template: str) -> bool:
        """True if the template has channels and messages."""
        return CHANNEL in template and MESSAGE in template

    def grammar(self, rules: CallRules, vocabulary: Vocabulary) -> str:
        """Lark text of the answers that the rules allow."""
        ends = ["call: " + " | ".join(_call(tool, vocabulary) for tool in rules.tools)]
        starts = ["call"]
        if not rules.calls_alone:
            ends += [f"final: {final_message(vocabulary)} TEXT", TEXT_RULE]
            starts.append("final")
        return "\n".join([f"start: {' | '.join(starts)}", *ends])

    def parser(self, rules: CallRules) -> TurnParser:
        """A parser for one answer."""
        return HarmonyParser(rules.names)


def final_message(vocabulary: Vocabulary) -> str:
    """The term for the beginning of the answer itself."""
    return " ".join(marker(item, vocabulary) for item in HarmonyFormat.answer_head)


def messages_before(vocabulary: Vocabulary, *, max_thinking_tokens: int | None) -> str:
    """The rule ``before``: a message of thinking, or a short text before a call. Each may use the whole budget."""
    channel, message = marker(CHANNEL, vocabulary), marker(MESSAGE, vocabulary)
    close = f"{marker(END, vocabulary)} {marker(START, vocabulary)} {literal('assistant')}"
    budget = "" if max_thinking_tokens is None else f"[max_tokens={max_thinking_tokens}]"
    names = f"({literal('analysis')} | {literal('commentary')})"
    return f"before: {channel} {names} {message} thought {close}\nthought{budget}: /(.|\\n)*/"


def _call(tool: Tool, vocabulary: Vocabulary) -> str:
    """A call. The recipient comes after the channel, as models mostly write it, or before it, as in templates."""
    channel, recipient = marker(CHANNEL, vocabulary), f"to=functions.{tool.name}"
    behind = f"{channel} {literal(f'commentary {recipient} ')}"
    before = f"{literal(f' {recipient}')} {channel} {literal('commentary ')}"
    kind = f"{marker(CONSTRAIN, vocabulary)}? {literal('json')} {marker(MESSAGE, vocabulary)}"
    return f"({behind} | {before}) {kind} {arguments(tool)}"


class HarmonyParser:
    """Parses one answer, which continues after ``<|start|>assistant``."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._text = ""
        self._is_header = True
        self._kind = ""
        self._num_calls = 0

    @property
    def is_thinking(self) -> bool:
        """True within messages of thinking."""
        return self._kind == "analysis"

    def push(self, text: str) -> Iterator[TurnPart]:
        """Take more text; yield the parts that are certain now."""
        self._text += text
        while self._text:
            before = (self._is_header, len(self._text))
            yield from self._read_header() if self._is_header else self._read_message()
            if (self._is_header, len(self._text)) == before:
                return

    def finish(self) -> Iterator[TurnPart]:
        """Yield the rest: text without a message is content; an incomplete name of a role or channel is dropped."""
        rest, self._text = self._text, ""
        is_text = rest.startswith(_RECIPIENT_FIRST) and CHANNEL not in rest
        if not self._is_header:
            yield from self._part(rest)
        elif rest.strip() and (is_text or not self._is_begun_header(rest)):
            yield ContentText(rest)

    @staticmethod
    def _is_begun_header(text: str) -> bool:
        begins = (START, CHANNEL, _RECIPIENT_FIRST)
        return text.startswith(begins) or any(begin.startswith(text) for begin in begins)

    def _read_header(self) -> Iterator[TurnPart]:
        begin = self._text.find(MESSAGE)
        may_be_end = self._text.startswith(_ENDS) or any(end.startswith(self._text) for end in _ENDS)
        if not self._is_begun_header(self._text) and not may_be_end:
            # No header at all: an answer without channels.
            self._kind, self._is_header = "final", False
            return
        if begin < 0:
            return
        header, self._text = self._text[:begin], self._text[begin + len(MESSAGE) :]
        self._is_header = False
        recipient = _RECIPIENT.search(header)
        channel = _CHANNEL_NAME.search(header)
        if recipient is not None and recipient[1] in self._names:
            self._kind = "call"
            yield CallBegin(self._num_calls, new_call_id(), recipient[1])
            self._num_calls += 1
        else:
            self._kind = channel[1] if channel is not None else "final"

    def _read_message(self) -> Iterator[TurnPart]:
        places = [(place, item) for item in _ENDS if (place := self._text.find(item)) >= 0]
        if not places:
            cut = len(self._text) - num_held(self._text, *_ENDS)
            text, self._text = self._text[:cut], self._text[cut:]
            yield from self._part(text)
            return
        place, item = min(places)
        text = self._text[:place]
        self._text = self._text[place if item == START else place + len(item) :]
        self._is_header = True
        yield from self._part(text)

    def _part(self, text: str) -> Iterator[TurnPart]:
        if not text:
            return
        if self._kind == "call":
            yield CallArguments(self._num_calls - 1, text)
        elif self._kind == "analysis":
            yield ReasoningText(text)
        else:
            yield ContentText(text)
