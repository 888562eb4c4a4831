"""Thinking before the answer: how it is marked, parsed and bounded, and how the answer's grammar follows it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from router.grammar.lark import around, literal
from router.tools.formats.harmony import CHANNEL, MESSAGE, HarmonyFormat, HarmonyParser, final_message, messages_before
from router.tools.lark import Vocabulary, marker
from router.tools.turn import ReasoningText, TurnPart
from router.tools.turn_parser import PlainParser, TurnParser, num_held


class BudgetError(ValueError):
    """Thinking cannot be bounded here; the message says why."""


class Opening(Enum):
    """What an answer begins with, judged by the end of its prompt."""

    OPEN = "thinking that the template began"
    CLOSED = "the answer itself: the template ended the thinking"
    FREE = "what the model chooses"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerGrammar:
    """The grammar after thinking. ``names_channel``: it names its channel itself, if the format has channels."""

    text: str
    names_channel: bool = False


class ReasoningFormat(Protocol):
    """How a model marks its thinking."""

    @property
    def name(self) -> str:
        """Its name in the configuration."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers that detokenizing must keep if they are special tokens."""

    def is_spoken_by(self, template: str, vocabulary: Vocabulary) -> bool:
        """True if a model with this template and these tokens marks its thinking in this way."""

    def opening(self, prompt: str) -> Opening:
        """What an answer to a rendered prompt begins with."""

    def grammar(
        self, answer: AnswerGrammar, vocabulary: Vocabulary, *, opening: Opening, max_thinking_tokens: int | None
    ) -> str:
        """The grammar of thinking, if there may be any, followed by the answer's own grammar.

        Raises:
            BudgetError: The end marker is not a single token.
        """

    def parser(self, inner: TurnParser, *, opening: Opening) -> TurnParser:
        """A parser that reads thinking, and passes the text after it to the answer's own parser."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedReasoning:
    """Thinking between two markers at the beginning of the answer; the template may have written the first one.

    ``label`` is a text that belongs to the first marker.
    """

    name: str
    begin: str
    end: str
    label: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """Both markers."""
        return (self.begin, self.end)

    def is_spoken_by(self, template: str, vocabulary: Vocabulary) -> bool:
        """True if the template contains the end marker, or the model has a token for each marker."""
        return self.end in template or None not in [vocabulary.added_token_id(item) for item in self.markers]

    def opening(self, prompt: str) -> Opening:
        """Judge by the end of the prompt."""
        text = prompt.rstrip()
        if text.endswith((self.begin + self.label).rstrip()):
            return Opening.OPEN
        return Opening.CLOSED if text.endswith(self.end) else Opening.FREE

    def grammar(
        self, answer: AnswerGrammar, vocabulary: Vocabulary, *, opening: Opening, max_thinking_tokens: int | None
    ) -> str:
        """Thinking is everything up to the first end marker."""
        if opening is Opening.CLOSED:
            return answer.text
        end = marker(self.end, vocabulary)
        if end != literal(self.end):
            budget = "" if max_thinking_tokens is None else f"[max_tokens={max_thinking_tokens}]"
            thinking = f"thinking: thought {end} /\\n{{0,2}}/\nthought{budget}: /(.|\\n)*/"
        elif max_thinking_tokens is not None:
            raise BudgetError(f"thinking of this model ends with {self.end}, which is no token of its tokenizer")
        else:
            thinking = f"thinking: thought /\\n{{0,2}}/\nthought[suffix={end}]: /(.|\\n)*/"
        start = "start: thinking @answer"
        if opening is Opening.FREE:
            label = literal(self.label) if self.label else ""
            start = f"start: ({marker(self.begin, vocabulary)} {label} thinking)? @answer"
        return around(f"{start}\n{thinking}", {"answer": answer.text}).text

    def parser(self, inner: TurnParser, *, opening: Opening) -> TurnParser:
        """A parser of thinking and answer."""
        return inner if opening is Opening.CLOSED else TaggedParser(self, inner, is_open=opening is Opening.OPEN)


class HarmonyReasoning:
    """Thinking on a channel of its own, which the model begins."""

    name = HarmonyFormat.name
    markers = HarmonyFormat.markers

    def is_spoken_by(self, template: str, vocabulary: Vocabulary) -> bool:  # noqa: ARG002 (the template says all)
        """True if the template has channels and messages."""
        return CHANNEL in template and MESSAGE in template

    def opening(self, prompt: str) -> Opening:  # noqa: ARG002 (no prompt begins it)
        """The prompt never begins thinking; the model does."""
        return Opening.FREE

    def grammar(
        self, answer: AnswerGrammar, vocabulary: Vocabulary, *, opening: Opening, max_thinking_tokens: int | None
    ) -> str:
        """The answer is the final message, unless its grammar names a channel."""
        assert opening is Opening.FREE
        head = "" if answer.names_channel else final_message(vocabulary)
        before = messages_before(vocabulary, max_thinking_tokens=max_thinking_tokens)
        return around(f"start: before* {head} @answer\n{before}", {"answer": answer.text}).text

    def parser(self, inner: TurnParser, *, opening: Opening) -> TurnParser:
        """One parser reads all channels; without tools there are no calls."""
        assert opening is Opening.FREE
        return HarmonyParser(frozenset()) if isinstance(inner, PlainParser) else inner


class TaggedParser:
    """Reads thinking between markers, without the spaces around it."""

    def __init__(self, tags: TaggedReasoning, inner: TurnParser, *, is_open: bool) -> None:
        self._tags = tags
        self._inner = inner
        self._text = ""
        self._state = "thinking" if is_open else "start"
        self._has_begun = False

    @property
    def is_thinking(self) -> bool:
        """True between the markers."""
        return self._state == "thinking"

    def push(self, text: str) -> Iterator[TurnPart]:
        """Take more text; yield the parts that are certain now."""
        if self._state == "answer":
            yield from self._inner.push(text)
            return
        self._text += text
        if self._state == "start":
            yield from self._look_for_begin()
        if self._state == "thinking":
            yield from self._think()
        if self._state == "spaces":
            yield from self._skip_spaces()

    def finish(self) -> Iterator[TurnPart]:
        """Yield the rest: thinking without an end marker counts as thinking."""
        rest, self._text = self._text, ""
        if self._state == "thinking":
            if text := self._stripped(rest).rstrip():
                yield ReasoningText(text)
        elif self._state == "start":
            yield from self._inner.push(rest)
        yield from self._inner.finish()

    def _look_for_begin(self) -> Iterator[TurnPart]:
        text, begin = self._text.lstrip(), self._tags.begin + self._tags.label
        if text.startswith(begin):
            self._state, self._text = "thinking", text[len(begin) :]
        elif not begin.startswith(text):
            self._state, whole = "answer", self._text
            self._text = ""
            yield from self._inner.push(whole)

    def _think(self) -> Iterator[TurnPart]:
        end = self._tags.end
        place = self._text.find(end)
        if place >= 0:
            thought, self._text = self._text[:place].rstrip(), self._text[place + len(end) :]
            self._state = "spaces"
        else:
            certain = self._text[: len(self._text) - num_held(self._text, end)].rstrip()
            thought, self._text = certain, self._text[len(certain) :]
        if thought := self._stripped(thought):
            self._has_begun = True
            yield ReasoningText(thought)

    def _stripped(self, text: str) -> str:
        return text if self._has_begun else text.lstrip()

    def _skip_spaces(self) -> Iterator[TurnPart]:
        text = self._text.lstrip()
        self._text = ""
        if text:
            self._state = "answer"
            yield from self._inner.push(text)


REASONING_FORMATS: Final[dict[str, ReasoningFormat]] = {
    item.name: item
    for item in (
        HarmonyReasoning(),
        TaggedReasoning(name="think", begin="<think>", end="</think>"),
        TaggedReasoning(name="mistral", begin="[THINK]", end="[/THINK]"),
        TaggedReasoning(name="gemma4", begin="<|channel>", label="thought\n", end="<channel|>"),
    )
}
