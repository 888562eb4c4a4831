"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from router.api.generate_body import MAX_INT64, GenerateBody, NumLogprobs, StrictBody


class TextPart(StrictBody):
    """One part of a message; images and audio are not supported."""

    type: Literal["text"]
    text: str


class Message(StrictBody):
    """One turn of a conversation. Tool calls are not supported."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]
    name: str | None = None


class ChatBody(GenerateBody):
    """Parameters of a chat completion."""

    neutral_values: ClassVar[dict[str, tuple[object, ...]]] = {
        **GenerateBody.neutral_values,
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "parallel_tool_calls": (None, True, False),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "prediction": (None,),
        "reasoning_effort": (None,),
        "verbosity": (None,),
        "web_search_options": (None,),
        "chat_template": (None,),
        "documents": (None, []),
    }

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT64)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
