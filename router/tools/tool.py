"""The tools of a request, and which of them the answer may or must call."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function of the caller's. ``parameters`` is the JSON schema of its arguments, an object; None takes none.

    A schema that ``is_strict`` is followed to the letter or refused; of another one, what grammars do not know is left
    out.
    """

    name: str
    parameters: Mapping[str, Any] | None = None
    is_strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """What an answer may do with tools.

    ``tools`` are those that it may call. With ``must_call`` it is nothing but calls; with ``may_call_many`` there may
    be several. With ``has_form`` an answer that calls nothing matches a grammar of its own.
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
        """Whether a format's grammar is that of calls: other answers have their own, or there are none."""
        return self.must_call or self.has_form


def new_call_id() -> str:
    """An id as OpenAI's API makes them."""
    return f"call_{secrets.token_hex(12)}"
