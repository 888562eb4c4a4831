"""The bodies of POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from engine.contract.logits_params import TokenId
from router.api.bodies.chat_body import Message
from router.api.bodies.strict_body import JsonObject, StrictBody
from router.api.bodies.tools_body import MAX_NUM_TOOLS, ToolBody


class TokenizeBody(StrictBody):
    """A text, or a conversation to be rendered first."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}}},
                {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}}},
            ]
        }
    )

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, fail_fast=True)
    tools: list[ToolBody] | None = Field(None, max_length=MAX_NUM_TOOLS, fail_fast=True)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    return_token_strs: bool | None = None

    _read: set[str] = PrivateAttr(default_factory=set)

    @property
    def read_fields(self) -> set[str]:
        """The fields of messages that the template has read."""
        return self._read

    def template_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the template should render."""
        return [tool.plain() for tool in self.tools] if self.tools else None

    def template_parameters(self) -> dict[str, Any]:
        """None: only chats have them."""
        return {}

    @model_validator(mode="after")
    def _has_one_text(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either 'prompt' or 'messages'")
        return self


class DetokenizeBody(StrictBody):
    """Token ids."""

    model: str | None = None
    tokens: list[TokenId] = Field(fail_fast=True)
