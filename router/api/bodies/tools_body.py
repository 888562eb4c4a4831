"""Tools in the body of a chat: the available ones, which of them may be called, and earlier calls."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator
from pydantic_core import from_json

from router.api.bodies.strict_body import JsonObject, StrictBody, UnsupportedValueError
from router.errors import InvalidRequestError
from router.tools.tool import CallRules, Tool

MAX_NUM_TOOLS = 1024
"""OpenAI allows 128 and Anthropic any number; the size of their grammar bounds tools with long schemas before this."""

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
"""As long as Anthropic's; OpenAI's have 64 characters."""

CallId = Annotated[str, Field(min_length=1, max_length=256)]


class FunctionBody(StrictBody):
    """A function that may be called. ``parameters`` is the JSON schema of an object."""

    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _is_schema_of_an_object(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None and schema.get("type", "object") != "object":
            raise ValueError(f"the schema of a tool's arguments must have type 'object', got {schema['type']!r}")
        return schema


class ToolBody(StrictBody):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: FunctionBody

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_forms(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise UnsupportedValueError("", kind=kind[:40], hint="use tools of type 'function'")
        _refuse_form_of_responses(data)
        return data

    def plain(self) -> dict[str, Any]:
        """The tool for chat templates, without unset fields."""
        function = self.function
        said = {name: value for name in type(function).model_fields if (value := getattr(function, name)) is not None}
        return {"type": self.type, "function": said}


def _refuse_form_of_responses(data: Any) -> None:
    if isinstance(data, dict) and "name" in data and "function" not in data:
        raise ValueError(
            "in chats the tool's name and its other fields except 'type' belong into the object 'function'"
        )


class FunctionNameBody(StrictBody):
    """The name of a function."""

    name: str


class NamedToolBody(StrictBody):
    """The tool that the answer must call."""

    type: Literal["function"]
    function: FunctionNameBody

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_forms(cls, data: Any) -> Any:
        _refuse_form_of_responses(data)
        return data


class AllowedToolsBody(StrictBody):
    """Some of the tools. The answer may (``auto``) or must (``required``) call any of them."""

    mode: Literal["auto", "required"]
    tools: list[NamedToolBody] = Field(min_length=1, max_length=MAX_NUM_TOOLS, fail_fast=True)


class AllowedChoiceBody(StrictBody):
    """The tools that the answer may call. The prompt does not mention the others."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolsBody

    @property
    def names(self) -> frozenset[str]:
        """The names of these tools."""
        return frozenset(tool.function.name for tool in self.allowed_tools.tools)


def choice_form(choice: Any) -> str:
    """The tag of a ``tool_choice``, of chats and of responses: a mode, a named tool, or some allowed ones."""
    if isinstance(choice, (dict, StrictBody)):
        kind = choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", None)
        return "~allowed" if kind == "allowed_tools" else "~named"
    return "~mode"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("~mode")]
    | Annotated[NamedToolBody, Tag("~named")]
    | Annotated[AllowedChoiceBody, Tag("~allowed")],
    Discriminator(choice_form),
]


class CalledFunctionBody(StrictBody):
    """A function that was called, with its arguments as the model wrote them, normally JSON text."""

    name: ToolName
    arguments: str

    def read_arguments(self) -> dict[str, Any] | str:
        """The arguments for chat templates: an object; if the call ended early, as much of it as was written. Any other
        text is passed to the template unchanged.
        """
        try:
            value = json.loads(self.arguments or "{}")
            # Half of a surrogate pair is no character, and cannot be encoded.
            value = _with_whole_characters(value) if _HALF_CHARACTER in self.arguments.lower() else value
        except RecursionError:
            return self.arguments
        except ValueError:
            value = _begun(self.arguments)
        return value if isinstance(value, dict) else self.arguments


_HALF_CHARACTER = r"\ud"
"""The beginning of the escape of a surrogate, which forms a character only together with another one."""


def _begun(text: str) -> Any:
    """Parse a JSON text that may be incomplete, as far as it goes; None if even its start is not valid."""
    try:
        return from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return None


def _with_whole_characters(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_with_whole_characters(item) for item in value]
    if isinstance(value, dict):
        return {_with_whole_characters(name): _with_whole_characters(item) for name, item in value.items()}
    return value


class ToolCallBody(StrictBody):
    """A call that an earlier turn made."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunctionBody
    index: int | None = None

    def plain(self) -> dict[str, Any]:
        """The call for chat templates, which write the arguments themselves."""
        function = {"name": self.function.name, "arguments": self.function.read_arguments()}
        return {"id": self.id, "type": self.type, "function": function}


def call_rules(tools: Sequence[ToolBody], choice: ToolChoice | None, *, is_parallel: bool | None) -> CallRules | None:
    """What the answer may do with the tools of a body; None if it may call none.

    Raises:
        InvalidRequestError: Two tools have the same name, or the choice names an unknown tool.
    """
    counts = Counter(tool.function.name for tool in tools)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise _refusal(f"two tools have the name {twice[0]!r}: give each tool a name of its own", "tools")
    if choice == "none" or (not tools and choice in (None, "auto")):
        return None
    if not tools:
        raise _refusal("tool_choice needs tools to call: send tools, or leave tool_choice out", "tool_choice")
    known = tuple(
        Tool(name=tool.function.name, parameters=tool.function.parameters, is_strict=bool(tool.function.strict))
        for tool in tools
    )
    if isinstance(choice, NamedToolBody):
        return CallRules(tools=_chosen(known, {choice.function.name}), must_call=True, may_call_many=False)
    mode: str | None = None if isinstance(choice, AllowedChoiceBody) else choice
    if isinstance(choice, AllowedChoiceBody):
        known, mode = _chosen(known, choice.names), choice.allowed_tools.mode
    return CallRules(tools=known, must_call=mode == "required", may_call_many=is_parallel is not False)


def _chosen(tools: Sequence[Tool], names: Collection[str]) -> tuple[Tool, ...]:
    all_names = [tool.name for tool in tools]
    if unknown := sorted(set(names) - set(all_names)):
        told = ", ".join(all_names[:5]) + (", ..." if len(all_names) > 5 else "")
        raise _refusal(f"{unknown[0]!r} is not one of the tools: {told}", "tool_choice")
    return tuple(tool for tool in tools if tool.name in names)


def _refusal(reason: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(f"the parameter '{param}' is invalid: {reason}", code="invalid_parameter", param=param)
