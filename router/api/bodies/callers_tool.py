"""A tool that the caller runs, in the form of endpoints other than chats: its fields are on a level with its type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import model_validator

from router.api.bodies.strict_body import StrictBody, UnsupportedValueError
from router.api.bodies.tools_body import ToolName


class CallersTool(StrictBody):
    """What such tools share. Tools that a server runs by itself are refused by name: their type is not ``own_type``."""

    own_type: ClassVar[str]
    hint: ClassVar[str]
    neutral_values: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "defer_loading": (None, False),
        "allowed_callers": (None, ["direct"]),
    }

    name: ToolName
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_hosted_tools(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != cls.own_type:
            raise UnsupportedValueError("", kind=kind[:40], hint=cls.hint)
        return data

    def of_chat(self, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
        """The tool in a chat's form. ``parameters`` is the JSON schema of its arguments."""
        said = {
            "name": self.name,
            "description": self.description,
            "parameters": parameters,
            "strict": self.strict,
        }
        return {"type": "function", "function": {name: value for name, value in said.items() if value is not None}}
