"""Parses tool calls that are written as a head with a name, an object of arguments, and a tail."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from router.tools.tool import new_call_id
from router.tools.turn import CallArguments, CallBegin, TurnPart
from router.tools.turn_parser import ContentGate, num_held

NAME = "\0"
"""In a pattern: the name of a tool that may be called."""

SPACES = " "
"""In a pattern: any white space, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """How a format writes calls, as patterns: literal text, except for ``SPACES`` and ``NAME``.

    ``begin``: the marker before the first call; with ``may_begin_answer``, a call at the answer's start needs none.
    ``head``: what comes before the arguments. ``tail``: what comes after them.
    ``more``: what comes between a call's tail and the next one's arguments; None if each call has its own marker.
    ``close``: what ends a list of calls, if there is ``more``.
    """

    begin: str
    head: str
    tail: str
    more: str | None = None
    close: str = ""
    may_begin_answer: bool = False


class _State(Enum):
    START = "the answer may begin with a call"
    TEXT = "content, or a marker"
    HEAD = "behind a marker"
    ARGUMENTS = "within a call's arguments"
    TAIL = "behind them"
    NEXT = "another call, or the end of all"


class _Fit(Enum):
    NO = "no"
    PARTLY = "as far as the text goes"


@dataclass(frozen=True, slots=True)
class _Found:
    end: int
    name: str = ""


def _fit(pattern: str, text: str, names: Collection[str]) -> _Found | _Fit:
    """Match the beginning of a text with a pattern, and find where the match ends."""
    place, found = 0, ""
    for sign in pattern:
        if sign == SPACES:
            while place < len(text) and text[place].isspace():
                place += 1
        elif sign == NAME:
            end = place
            while end < len(text) and (text[end].isalnum() or text[end] in "_-."):
                end += 1
            found = text[place:end]
            if end == len(text):
                return _Fit.PARTLY if any(name.startswith(found) for name in names) else _Fit.NO
            if found not in names:
                return _Fit.NO
            place = end
        elif place == len(text):
            return _Fit.PARTLY
        elif text[place] != sign:
            return _Fit.NO
        else:
            place += 1
    return _Found(place, found)


class ArgumentsPiece(NamedTuple):
    """What a piece of text adds to a call's arguments, as JSON ``text``; once they end, ``rest`` is what follows."""

    text: str
    rest: str | None


class ArgumentsReader(Protocol):
    """Reads the arguments of one call, from their opening brace on."""

    def read(self, text: str) -> ArgumentsPiece:
        """Take more text; do not call it once the arguments have ended."""


class JsonObject:
    """Arguments that are a JSON object."""

    __slots__ = ("_depth", "_escaped", "_in_string")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def read(self, text: str) -> ArgumentsPiece:
        """The text unchanged, up to the object's end."""
        end = self._find(text)
        return ArgumentsPiece(text, None) if end is None else ArgumentsPiece(text[:end], text[end:])

    def _find(self, text: str) -> int | None:
        for place, sign in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif sign == "\\":
                    self._escaped = True
                elif sign == '"':
                    self._in_string = False
            elif sign == '"':
                self._in_string = True
            elif sign in "{[":
                self._depth += 1
            elif sign in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        return None


class CallParser:
    """Parses one answer. Text that begins like a call of a known tool, but turns out not to be one, is content."""

    def __init__(
        self,
        syntax: CallSyntax,
        names: Collection[str],
        *,
        make_id: Callable[[], str] = new_call_id,
        read_arguments: Callable[[], ArgumentsReader] = JsonObject,
    ) -> None:
        self._syntax = syntax
        self._names = names
        self._make_id = make_id
        self._gate = ContentGate()
        self._state = _State.START if syntax.may_begin_answer else _State.TEXT
        self._text = ""
        self._opened = ""
        self._num_calls = 0
        self._read_arguments = read_arguments
        self._arguments = read_arguments()

    @property
    def is_thinking(self) -> bool:
        """Never: this parser sees no thinking."""
        return False

    def push(self, text: str) -> Iterator[TurnPart]:
        """Take more text; yield the parts that are certain now."""
        self._text += text
        while self._text:
            before = (self._state, len(self._text))
            yield from self._step()
            if (self._state, len(self._text)) == before:
                return

    def finish(self) -> Iterator[TurnPart]:
        """Yield what was held back: an unfinished beginning that is no call is content."""
        rest, self._text = self._opened + self._text, ""
        self._opened = ""
        is_closing = self._state in (_State.TAIL, _State.NEXT) and self._is_begun_tail(rest)
        if not is_closing:
            yield from self._gate.content(rest)
        yield from self._gate.finish()

    def _is_begun_tail(self, rest: str) -> bool:
        pattern = self._syntax.tail if self._state is _State.TAIL else self._syntax.close
        return _fit(pattern, rest, self._names) is _Fit.PARTLY

    def _step(self) -> Iterator[TurnPart]:
        match self._state:
            case _State.START:
                yield from self._try_head(self._syntax.head, otherwise=_State.TEXT)
            case _State.TEXT:
                yield from self._look_for_marker()
            case _State.HEAD:
                yield from self._try_head(self._syntax.head, otherwise=_State.TEXT)
            case _State.ARGUMENTS:
                yield from self._take_arguments()
            case _State.TAIL:
                yield from self._try_tail()
            case _State.NEXT:
                yield from self._try_next()

    def _look_for_marker(self) -> Iterator[TurnPart]:
        begin = self._syntax.begin
        place = self._text.find(begin)
        if place < 0:
            cut = len(self._text) - num_held(self._text, begin)
            content, self._text = self._text[:cut], self._text[cut:]
            yield from self._gate.content(content)
            return
        content, self._text = self._text[:place], self._text[place + len(begin) :]
        yield from self._gate.content(content)
        self._opened, self._state = begin, _State.HEAD

    def _try_head(self, pattern: str, *, otherwise: _State) -> Iterator[TurnPart]:
        fit = _fit(pattern + "{", self._text, self._names)
        if fit is _Fit.PARTLY:
            return
        if isinstance(fit, _Found):
            yield from self._begin_call(fit)
        else:
            self._state = otherwise
            opened, self._opened = self._opened, ""
            yield from self._gate.content(opened)

    def _begin_call(self, found: _Found) -> Iterator[TurnPart]:
        self._gate.begin_call()
        self._opened = ""
        self._text = self._text[found.end - 1 :]
        self._arguments = self._read_arguments()
        self._state = _State.ARGUMENTS
        yield CallBegin(self._num_calls, self._make_id(), found.name)
        self._num_calls += 1

    def _take_arguments(self) -> Iterator[TurnPart]:
        piece = self._arguments.read(self._text)
        self._text = piece.rest or ""
        if piece.text:
            yield CallArguments(self._num_calls - 1, piece.text)
        if piece.rest is not None:
            self._state = _State.TAIL if self._syntax.tail else _State.TEXT

    def _try_tail(self) -> Iterator[TurnPart]:
        fit = _fit(self._syntax.tail, self._text, self._names)
        if fit is _Fit.PARTLY:
            return
        self._state = _State.TEXT
        if isinstance(fit, _Found):
            self._text = self._text[fit.end :]
            if self._syntax.more is not None:
                self._state = _State.NEXT
        yield from ()

    def _try_next(self) -> Iterator[TurnPart]:
        assert self._syntax.more is not None
        close = _fit(self._syntax.close, self._text, self._names) if self._syntax.close else _Fit.NO
        fit = _fit(self._syntax.more + "{", self._text, self._names)
        if isinstance(close, _Found):
            self._text = self._text[close.end :]
            self._state = _State.TEXT
        elif isinstance(fit, _Found):
            yield from self._begin_call(fit)
        elif _Fit.PARTLY not in (close, fit):
            self._state = _State.TEXT
