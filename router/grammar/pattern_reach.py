"""Decides which regexes of JSON schemas a grammar can follow.

Schemas are written for regex engines with more features: look-around, back references, word boundaries. Schema
generators use these for plain things, for example pydantic for ``Decimal`` and zod for e-mail addresses.
"""

from __future__ import annotations

import re
from typing import Final

_KNOWN_LETTERS: Final = frozenset("afnrtvdDwWsSpPuUxAz")
"""Letters that have a meaning after a backslash, except ``\\b`` and ``\\B``: boundaries cannot be followed."""

_GROUP: Final = re.compile(r"\(\?(?:P?<[A-Za-z_]|[isxuUR]*(?:-[imsxuUR]+)?[:)])")
"""Supported groups: named, with flags, or plain. Not the flag ``m``, which turns anchors into look-around."""


def can_follow(pattern: str) -> bool:
    """True if a grammar can enforce a regex; False if only a backtracking engine could match it.

    It looks at the syntax only; an invalid regex passes.
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
