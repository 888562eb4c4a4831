"""An assistant's turn: its thinking, its content, and its tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias


class ReasoningText(NamedTuple):
    """More of what the model thinks before it answers."""

    text: str


class ContentText(NamedTuple):
    """More of the answer itself."""

    text: str


class CallBegin(NamedTuple):
    """The start of a tool call, the ``number``-th of the turn from 0; the tool's result refers to its ``call_id``."""

    number: int
    call_id: str
    name: str


class CallArguments(NamedTuple):
    """More of the last call's arguments, as a piece of JSON text."""

    number: int
    text: str


TurnPart: TypeAlias = ReasoningText | ContentText | CallBegin | CallArguments
"""What one piece of text adds to a turn, in the order in which the model wrote it."""


@dataclass(slots=True, kw_only=True)
class ToolCall:
    """A call as far as it was written. ``arguments`` is JSON text, which is incomplete if the answer is."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Turn:
    """A turn, assembled from its parts."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def parts(self) -> Iterator[TurnPart]:
        """The whole turn in few parts."""
        if self.reasoning:
            yield ReasoningText(self.reasoning)
        if self.content:
            yield ContentText(self.content)
        for number, call in enumerate(self.calls):
            yield CallBegin(number, call.call_id, call.name)
            yield CallArguments(number, call.arguments)

    def add(self, parts: Iterable[TurnPart]) -> None:
        """Take more parts, in their order."""
        for part in parts:
            match part:
                case ReasoningText(text):
                    self.reasoning += text
                case ContentText(text):
                    self.content += text
                case CallBegin(_, call_id, name):
                    self.calls.append(ToolCall(call_id=call_id, name=name))
                case CallArguments(number, text):
                    self.calls[number].arguments += text
