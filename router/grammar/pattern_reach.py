"""Which regexes of JSON schemas grammars can follow.

Schemas are written for engines that can do more: look-around, back references, boundaries of words. Generators of
schemas use these for plain things, as pydantic for ``Decimal`` and zod for addresses of mail.
"""

from __future__ import annotations

import re
from typing import Final

_KNOWN_LETTERS: Final = frozenset("afnrtvdDwWsSpPuUxAz")
"""Letters that mean something behind a backslash, beside ``\\b`` and ``\\B``: boundaries cannot be followed."""

_GROUP: Final = re.compile(r"\(\?(?:P?<[A-Za-z_]|[isxuUR]*(?:-[imsxuUR]+)?[:)])")
"""Groups that are understood: with names, with flags, and without anything. The flag ``m`` makes look-around of
anchors."""


def can_follow(pattern: str) -> bool:
    """Whether a grammar can hold a text to a regex: False for what only engines that go back and forth can do.

    It is told from the signs alone; a regex that is none at all passes.
    """
    at, is_in_class = 0, False
    while at < len(pattern):
        sign = pattern[at]
        if sign == "\\":
            if not _is_known_escape(pattern[at + 1 : at + 2]):
                return False
            at += 1
        elif is_in_class:
            is_in_class = sign != "]"
        elif sign == "[":
            is_in_class = True
        elif pattern.startswith("(?", at) and not _GROUP.match(pattern, at):
            return False
        at += 1
    return True


def _is_known_escape(sign: str) -> bool:
    if sign.isascii() and sign.isalpha():
        return sign in _KNOWN_LETTERS
    return sign not in "0123456789<>" or not sign
