"""The rules by which a request's answer is parsed, and the reader that parses it while its text arrives."""

from __future__ import annotations

from dataclasses import dataclass

from router.tools.reasoning import Opening, ReasoningFormat
from router.tools.tool import CallRules
from router.tools.tool_format import ToolFormat
from router.tools.turn import CallBegin, TurnPart
from router.tools.turn_parser import PlainParser, TurnParser


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRules:
    """How answers to one prompt are read.

    ``reasoning`` is the model's format of thinking, None if it has none; ``opening`` is how the answer begins after the
    prompt. ``calls`` is None if no tool may be called.
    """

    reasoning: ReasoningFormat | None = None
    opening: Opening = Opening.FREE
    tools: ToolFormat | None = None
    calls: CallRules | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers that detokenizing must keep, special tokens or not."""
        of_reasoning = () if self.reasoning is None else self.reasoning.markers
        return of_reasoning if self.tools is None or self.calls is None else (*of_reasoning, *self.tools.markers)

    def reader(self) -> TurnReader:
        """A reader for one answer."""
        parser: TurnParser = PlainParser()
        if self.tools is not None and self.calls is not None:
            parser = self.tools.parser(self.calls)
        if self.reasoning is not None:
            parser = self.reasoning.parser(parser, opening=self.opening)
        return TurnReader(parser, has_reasoning=self.reasoning is not None)


class TurnReader:
    """Reads one answer. If the model thinks, pass the text token by token, so that thinking tokens can be counted."""

    def __init__(self, parser: TurnParser, *, has_reasoning: bool) -> None:
        self._parser = parser
        self._num_tokens = 0
        self.has_reasoning = has_reasoning
        self.num_reasoning_tokens = 0
        self.num_calls = 0

    @property
    def is_thinking(self) -> bool:
        """True while the text is thinking, before the answer."""
        return self._parser.is_thinking

    def read(self, text: str, *, num_output_tokens: int, is_last: bool) -> tuple[TurnPart, ...]:
        """The parts that a piece of text adds; ``num_output_tokens`` counts the answer's tokens up to here."""
        was_thinking = self._parser.is_thinking
        parts = tuple(self._parser.push(text))
        if was_thinking or self._parser.is_thinking:
            self.num_reasoning_tokens += num_output_tokens - self._num_tokens
        self._num_tokens = num_output_tokens
        if is_last:
            parts = (*parts, *self._parser.finish())
        self.num_calls += sum(isinstance(part, CallBegin) for part in parts)
        return parts
