"""Converts arguments in the notation of Gemma's templates, ``{key:value,...}`` with marked strings, to JSON."""

from __future__ import annotations

import json
from enum import Enum, auto

from router.tools.call_parser import ArgumentsPiece
from router.tools.turn_parser import num_held

_DELIMITERS = ",}]"


class _State(Enum):
    KEY = auto()
    VALUE = auto()
    TEXT = auto()
    AFTER = auto()


class GemmaObject:
    """Reads one object. Strings are passed on as they arrive, other values once they are complete."""

    __slots__ = ("_closers", "_quote", "_state", "_text")

    def __init__(self, quote: str) -> None:
        self._quote = quote
        self._text = ""
        self._closers: list[str] = []
        self._state = _State.VALUE

    def read(self, text: str) -> ArgumentsPiece:
        """Take more text of the object."""
        self._text += text
        written: list[str] = []
        while True:
            if self._state is not _State.TEXT:
                self._text = self._text.lstrip()
            piece = self._step() if self._text else None
            if piece is None:
                return ArgumentsPiece("".join(written), None)
            written.append(piece)
            if not self._closers:
                return ArgumentsPiece("".join(written), self._text)

    def _step(self) -> str | None:
        """The JSON of the next item; None if the item is not complete yet."""
        match self._state:
            case _State.KEY:
                return self._close() if self._text[0] == "}" else self._key()
            case _State.VALUE:
                return self._value()
            case _State.TEXT:
                return self._more_text()
            case _State.AFTER:
                return self._after()

    def _key(self) -> str | None:
        key, colon, rest = self._text.partition(":")
        if not colon:
            return None
        self._text, self._state = rest, _State.VALUE
        return f"{json.dumps(key.strip(), ensure_ascii=False)}:"

    def _value(self) -> str | None:
        sign = self._text[0]
        if sign in "{[":
            self._text = self._text[1:]
            self._closers.append("}" if sign == "{" else "]")
            self._state = _State.KEY if sign == "{" else _State.VALUE
            return sign
        if self._text.startswith(self._quote):
            self._text, self._state = self._text[len(self._quote) :], _State.TEXT
            return '"'
        if self._quote.startswith(self._text):
            return None
        if sign == "]" and self._closers[-1] == "]":
            return self._close()
        return self._bare()

    def _bare(self) -> str | None:
        """A number, true, false or null; any other word is taken as a string."""
        end = min((place for sign in _DELIMITERS if (place := self._text.find(sign)) >= 0), default=-1)
        if end < 0:
            return None
        word, self._text = self._text[:end].rstrip(), self._text[end:]
        self._state = _State.AFTER
        try:
            json.loads(word, parse_constant=_no_json)
        except ValueError:
            return json.dumps(word, ensure_ascii=False)
        return word

    def _more_text(self) -> str | None:
        place = self._text.find(self._quote)
        end = place if place >= 0 else len(self._text) - num_held(self._text, self._quote)
        said = json.dumps(self._text[:end], ensure_ascii=False)[1:-1]
        if place >= 0:
            self._text, self._state = self._text[place + len(self._quote) :], _State.AFTER
            return f'{said}"'
        self._text = self._text[end:]
        return said or None

    def _after(self) -> str:
        if self._text[0] != ",":
            return self._close()
        self._text = self._text[1:]
        self._state = _State.KEY if self._closers[-1] == "}" else _State.VALUE
        return ","

    def _close(self) -> str:
        """End the object: any text in place of its end is taken as the end."""
        self._text, self._state = self._text[1:], _State.AFTER
        return self._closers.pop()


def _no_json(word: str) -> None:
    raise ValueError(word)
