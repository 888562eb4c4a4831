"""Translates the body of a response to that of a chat, which then runs like any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from router.api.bodies.chat_body import ChatBody
from router.api.responses.body import AllowedTools, ResponsesBody, TextFormat, ToolName
from router.api.responses.items import InputItem, MessageItem, chat_messages
from router.api.told_as import valid_chat
from router.errors import InvalidRequestError

NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "truncate_prompt_tokens": "truncation",
}
"""The endpoint's names of a chat's parameters."""


def input_items(body: ResponsesBody) -> list[InputItem]:
    """The items of a body; a plain text becomes a user message."""
    if isinstance(body.input, str):
        return [MessageItem.model_validate({"role": "user", "content": body.input})]
    return body.input


def chat_of(body: ResponsesBody, items: Sequence[InputItem]) -> ChatBody:
    """The equivalent chat.

    Args:
        body: Everything but the conversation.
        items: The conversation, including earlier responses.

    Raises:
        InvalidRequestError: Some parameters cannot be combined, or a chat takes no such values.
    """
    messages = chat_messages(items)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    text, reasoning = body.text, body.reasoning
    return valid_chat(
        {
            **body.shared_fields(),
            "messages": messages,
            "max_completion_tokens": body.max_output_tokens,
            "stop": body.stop,
            "chat_template_kwargs": body.chat_template_kwargs,
            "logprobs": True if body.wants_logprobs else None,
            "top_logprobs": body.top_logprobs if body.wants_logprobs else None,
            "truncate_prompt_tokens": -1 if body.truncation == "auto" else None,
            "reasoning_effort": reasoning.effort if reasoning is not None else None,
            "verbosity": text.verbosity if text is not None else None,
            "response_format": _response_format(text.format) if text is not None else None,
            **_tools(body),
        },
        params=body.params,
    )


def _response_format(form: TextFormat | None) -> dict[str, Any] | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "json_object"}
    if form.name is None or form.schema_ is None:
        raise InvalidRequestError(
            "text.format of type 'json_schema' needs 'name' and 'schema'", code="invalid_parameter", param="text.format"
        )
    said = {"name": form.name, "description": form.description, "schema": form.schema_, "strict": form.strict}
    return {"type": "json_schema", "json_schema": {name: value for name, value in said.items() if value is not None}}


def _tools(body: ResponsesBody) -> dict[str, Any]:
    """A chat's ``tools``, ``tool_choice`` and ``parallel_tool_calls``."""
    tools, choice = body.tools or [], body.tool_choice
    if isinstance(choice, AllowedTools):
        allowed = {tool.name for tool in choice.tools}
        if unknown := sorted(allowed - {tool.name for tool in tools}):
            raise InvalidRequestError(
                f"tool_choice allows {unknown[0]!r}, which is not one of the tools",
                code="invalid_parameter",
                param="tool_choice",
            )
        tools = [tool for tool in tools if tool.name in allowed]
    said: dict[str, Any] = {}
    if tools:
        said["tools"] = [tool.of_chat(tool.parameters) for tool in tools]
        said["parallel_tool_calls"] = body.parallel_tool_calls
    if isinstance(choice, ToolName):
        said["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice is not None:
        said["tool_choice"] = choice.mode if isinstance(choice, AllowedTools) else choice
    return said
