"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from router.api.generate_body import MAX_INT64, GenerateBody, NumLogprobs, StrictBody, UnsupportedValueError

_OTHER_PARTS = frozenset(
    {"image_url", "input_image", "image", "input_audio", "audio_url", "video_url", "file", "refusal"}
)
_OTHER_ROLES = frozenset({"tool", "function"})

CONTENT_FORMS = frozenset({"text", "parts"})


class TextPart(StrictBody):
    """One part of a message; images and audio are not supported."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_parts(cls, data: Any) -> Any:
        if isinstance(data, dict) and (kind := _name_in(data.get("type"), _OTHER_PARTS)):
            raise UnsupportedValueError("", kind=kind, hint="only text parts are")
        return data


class Message(StrictBody):
    """One turn of a conversation. Tool calls are not supported.

    What an answer's message has beside its text is taken where it is empty, so that the message can be sent back.
    """

    neutral_values: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "refusal": (None,),
        "tool_calls": (None, []),
        "function_call": (None,),
        "audio": (None,),
        "annotations": (None, []),
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[TextPart], Field(min_length=1, fail_fast=True), Tag("parts")],
        Discriminator(lambda content: "parts" if isinstance(content, list) else "text"),
    ]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_roles(cls, data: Any) -> Any:
        if isinstance(data, dict) and (role := _name_in(data.get("role"), _OTHER_ROLES)):
            raise UnsupportedValueError("role", kind=role, hint="only system, developer, user and assistant are")
        return data


def _name_in(value: Any, names: Collection[str]) -> str:
    """The value, where it is one of the names; empty where it is not."""
    return value if isinstance(value, str) and value in names else ""


class ChatBody(GenerateBody):
    """Parameters of a chat completion."""

    neutral_values: ClassVar[Mapping[str, tuple[object, ...]]] = {
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
