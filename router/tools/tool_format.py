"""The Protocol of a format in which models write calls of tools."""

from __future__ import annotations

from typing import Protocol

from router.tools.lark import Vocabulary
from router.tools.tool import CallRules
from router.tools.turn_parser import TurnParser


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
