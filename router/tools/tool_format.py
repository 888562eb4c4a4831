"""The tools of a request, and the Protocol of a format in which models write calls of them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from router.tools.lark import Vocabulary
from router.tools.turn_parser import TurnParser


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


class ToolSchemaError(ValueError):
    """A format cannot follow the schema of a ``tool``'s arguments, at a ``place`` in it, such as ``.properties.a``."""

    def __init__(self, reason: str, *, place: str = "", tool: str = "") -> None:
        self.reason, self.place, self.tool = reason, place, tool
        super().__init__(f"{tool}{place}: {reason}")


class ToolFormat(Protocol):
    """One format: how it is known, the grammar of its answers, and what reads them."""

    @property
    def name(self) -> str:
        """Its name in the configuration."""

    @property
    def markers(self) -> tuple[str, ...]:
        """What its answers consist of beside text; where these are special tokens they must stay in the text."""

    @property
    def answer_head(self) -> tuple[str, ...]:
        """The markers and texts that stand before an answer that calls nothing."""

    def is_spoken_by(self, template: str) -> bool:
        """Whether a chat template writes calls so."""

    def grammar(self, rules: CallRules, vocabulary: Vocabulary) -> str:
        """Lark text of the answers that the rules allow, behind any thinking; of calls alone where other answers have
        a form.

        Raises:
            ToolSchemaError: A schema cannot be followed. Formats whose arguments are JSON leave that to whoever checks
                the grammar.
        """

    def parser(self, rules: CallRules) -> TurnParser:
        """What reads one answer."""
