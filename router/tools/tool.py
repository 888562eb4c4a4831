"""The tools of a request, and which of them the answer may or must call."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A caller's function. ``parameters`` is the JSON schema of its arguments object; None if it takes none.

    A schema with ``is_strict`` is followed exactly or refused. Without it, keywords that grammars do not support are
    left out.
    """

    name: str
    parameters: Mapping[str, Any] | None = None
    is_strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """What an answer may do with tools.

    ``tools`` are the tools that it may call. With ``must_call`` it consists of calls only; with ``may_call_many`` there
    may be several. With ``has_form`` an answer without calls must match a grammar of its own.
    """

    tools: tuple[Tool, ...]
    must_call: bool = False
    may_call_many: bool = True
    has_form: bool = False
    names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", frozenset(tool.name for tool in self.tools))

    @property
    def calls_alone(self) -> bool:
        """True if a format's grammar covers calls only: other answers have their own grammar, or are not allowed."""
        return self.must_call or self.has_form


def new_call_id() -> str:
    """A new id in the style of OpenAI's API."""
    return f"call_{secrets.token_hex(12)}"
