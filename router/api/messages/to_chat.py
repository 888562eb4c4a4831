"""Translates a conversation of /v1/messages to that of a chat, which then runs like any other."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from engine.contract.messages import SamplingParams
from router.api.bodies.chat_body import ChatBody
from router.api.messages.body import (
    CountTokensBody,
    MessageParam,
    MessagesBody,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from router.api.told_as import valid_chat
from router.text.chat_template import ChatTemplate
from router.text.template_files import ChatTemplates

NAMES: Mapping[str, str] = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "enable_thinking": "thinking.type",
    "thinking_token_budget": "thinking.budget_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "function.parameters": "input_schema",
}
"""The endpoint's names of a chat's parameters."""


def chat_of(body: MessagesBody | CountTokensBody, *, thinks: bool, templates: ChatTemplates | None) -> ChatBody:
    """The equivalent chat, for a model with these templates; ``thinks``: the model thinks before it answers.

    Raises:
        InvalidRequestError: A chat takes no such values.
    """
    messages = [plain for message in body.messages for plain in _chat_messages(message)]
    if body.system:
        messages.insert(0, {"role": "system", "content": _text_of(body.system)})
    tools = _tools(body)
    told = tools.get("tools") if tools.get("tool_choice") != "none" else None
    template = None if templates is None else templates.for_tools(told)
    fields: dict[str, Any] = {
        "messages": messages,
        **tools,
        **_thinking(body, thinks=thinks, template=template),
        "model": body.model,
    }
    if body.messages[-1].role == "assistant":
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(body, MessagesBody):
        fields |= body.shared_fields()
        fields |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences or None}
    form = body.output_format
    if form is None and body.output_config is not None:
        form = body.output_config.format
    if form is not None:
        schema = {"name": "output", "schema": form.schema_, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return valid_chat(fields, params=body.params if isinstance(body, MessagesBody) else SamplingParams)


def _chat_messages(message: MessageParam) -> list[dict[str, Any]]:
    """A turn as chat messages: tool results become messages of their own, before the user's text."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    texts: list[TextBlock] = []
    results: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in message.content:
        match block:
            case TextBlock():
                texts.append(block)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                function = {"name": block.name, "arguments": json.dumps(block.input)}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock():
                text = _text_of(block.content or "")
                results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
    turn: dict[str, Any] = {"role": message.role, "content": _text_of(texts) if texts else None}
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return [*results, turn] if texts or message.role == "assistant" else results


def _text_of(content: str | Iterable[TextBlock]) -> str:
    """The text of a content; the texts of blocks become lines."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _tools(body: MessagesBody | CountTokensBody) -> dict[str, Any]:
    """A chat's ``tools``, ``tool_choice`` and ``parallel_tool_calls``."""
    choice = body.tool_choice
    said: dict[str, Any] = {"tools": [tool.of_chat(tool.input_schema) for tool in body.tools]} if body.tools else {}
    if choice is None or (not body.tools and choice.type in ("auto", "none")):
        return said
    if choice.disable_parallel_tool_use:
        said["parallel_tool_calls"] = False
    if choice.type == "tool":
        return said | {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
    return said | {"tool_choice": "required" if choice.type == "any" else choice.type}


def _thinking(body: MessagesBody | CountTokensBody, *, thinks: bool, template: ChatTemplate | None) -> dict[str, Any]:
    """A chat's parameters for thinking. Thinking is off unless asked for, though some templates turn it on by default.

    For a model that does not think, any budget is fine.
    """
    said: dict[str, Any] = {"chat_template_kwargs": body.chat_template_kwargs}
    is_said = body.thinking is not None or "enable_thinking" in (body.chat_template_kwargs or {})
    if not is_said and template is not None and template.reads("enable_thinking"):
        said["enable_thinking"] = False
    if body.thinking is not None:
        said["enable_thinking"] = body.thinking.type != "disabled"
        said["thinking_token_budget"] = body.thinking.budget_tokens if thinks else None
    if body.output_config is not None:
        said["reasoning_effort"] = body.output_config.effort
    return said
