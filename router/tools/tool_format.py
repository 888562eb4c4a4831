"""The Protocol of the formats in which models write tool calls."""

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
    """One format: how it is recognized, the grammar of its answers, and their parser."""

    @property
    def name(self) -> str:
        """Its name in the configuration."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers in its answers, which detokenizing must keep if they are special tokens."""

    @property
    def answer_head(self) -> tuple[str, ...]:
        """The markers and texts before an answer without calls."""

    def is_spoken_by(self, template: str) -> bool:
        """True if a chat template writes calls in this format."""

    def grammar(self, rules: CallRules, vocabulary: Vocabulary) -> str:
        """Lark text of the answers that the rules allow, after any thinking; of calls only if other answers have a
        grammar of their own.

        Raises:
            ToolSchemaError: A schema cannot be followed. Formats with JSON arguments leave that to the check of the
                grammar.
        """

    def parser(self, rules: CallRules) -> TurnParser:
        """A parser for one answer."""
