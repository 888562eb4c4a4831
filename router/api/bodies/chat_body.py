"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, PrivateAttr, Tag, model_validator

from router.api.bodies.generate_body import MAX_INT64, GenerateBody, NumLogprobs, form_of
from router.api.bodies.strict_body import JsonObject, StrictBody, UnsupportedValueError, tell_values_without_effect
from router.api.bodies.tools_body import MAX_NUM_TOOLS, AllowedChoiceBody, CallId, ToolBody, ToolCallBody, ToolChoice
from router.text.chat_template import REASONING_FIELDS

_OTHER_PARTS = frozenset(
    {"image_url", "input_image", "image", "input_audio", "audio_url", "video_url", "file", "refusal"}
)
_OTHER_ROLES = frozenset({"function"})
_REASONING = ("reasoning", "reasoning_content")

MAX_ROLE_CHARACTERS = 64


class TextPart(StrictBody):
    """One part of a message; images and audio are not supported."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_parts(cls, data: Any) -> Any:
        if isinstance(data, dict) and (kind := _name_in(data.get("type"), _OTHER_PARTS)):
            raise UnsupportedValueError("", kind=kind, hint="send text parts only")
        return data


Content = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[TextPart], Field(min_length=1, fail_fast=True), Tag("~parts")],
    Discriminator(
        lambda content: form_of(content, text="~text", items="~parts"),
        custom_error_type="content_type",
        custom_error_message="Input should be a valid string or a list of parts",
    ),
]


def _tell_of_no_content(schema: dict[str, Any], model: type[StrictBody]) -> None:
    """Say that a message may have no content. Which may, the schema does not say: those of the assistant."""
    tell_values_without_effect(schema, model)
    schema["required"].remove("content")
    schema["properties"]["content"]["oneOf"].append({"type": "null"})


class Message(StrictBody):
    """One turn of a conversation. The chat template determines which roles exist.

    All fields of an answer's message are accepted, so that it can be sent back unchanged. An assistant's turn may have
    no content.
    """

    model_config = ConfigDict(json_schema_extra=_tell_of_no_content)

    neutral_values: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "refusal": (None,),
        "function_call": (None,),
    }
    without_effect: ClassVar[frozenset[str]] = frozenset(
        {"annotations", "audio", "cache_control", "provider_specific_fields"}
    )

    role: Annotated[str, Field(min_length=1, max_length=MAX_ROLE_CHARACTERS)]
    content: Content
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallBody] | None = Field(None, max_length=MAX_NUM_TOOLS, fail_fast=True)
    tool_call_id: CallId | None = None
    annotations: list[Any] | None = None
    audio: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    provider_specific_fields: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_text(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if role := _name_in(data.get("role"), _OTHER_ROLES):
            raise UnsupportedValueError("role", kind=role, hint="send results of tools with the role 'tool'")
        if data.get("role") == "assistant" and data.get("content") is None:
            if data.get("audio") is not None:
                raise UnsupportedValueError("audio", hint="send the words that were spoken as content")
            return {**data, "content": ""}
        return data

    @model_validator(mode="after")
    def _fits_its_role(self) -> Message:
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message with the role 'tool' must have the tool_call_id of the call that it answers")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError(f"tool_call_id is only for messages with the role 'tool', not {self.role!r}")
        if self.role != "assistant" and self.tool_calls:
            raise ValueError(f"tool_calls are only for messages with the role 'assistant', not {self.role!r}")
        return self

    @property
    def text(self) -> str:
        """The content; the texts of parts become lines."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)

    def fields(self, read: set[str], *, joins_reasoning: bool = False, as_parts: bool = False) -> ReadFields:
        """The message for a chat template; ``read`` collects the names of the fields that the template reads.

        With ``joins_reasoning``, thinking in a turn with calls is put before the content, as one text. With
        ``as_parts`` the content is a list of parts; otherwise the texts of parts become lines.
        """
        thinking, content = self.reasoning or self.reasoning_content, self.text
        if joins_reasoning and self.tool_calls and thinking and content:
            thinking, content = None, f"{thinking}\n{content}"
            read.update(_REASONING)
        plain: dict[str, Any] = {"role": self.role, "content": content}
        if as_parts:
            has_parts = not isinstance(self.content, str) and content == self.text
            texts = [part.text for part in self.content if isinstance(part, TextPart)] if has_parts else [content]
            plain["content"] = [{"type": "text", "text": text} for text in texts]
        if self.name is not None:
            plain["name"] = self.name
        if self.tool_calls:
            plain["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        if thinking is not None:
            plain |= dict.fromkeys(REASONING_FIELDS, thinking)
        return ReadFields(plain, read=read)

    def ignored(self) -> Iterator[str]:
        """The names of what has no effect with any template."""
        yield from super().ignored()
        if not isinstance(self.content, str):
            for part in self.content:
                yield from (f"content.{name}" for name in part.ignored())

    def unread(self, read: Collection[str]) -> Iterator[str]:
        """The names of fields that have no effect, because the template has read only the fields in ``read``."""
        if self.name is not None and "name" not in read:
            yield "name"
        if self.tool_calls and "tool_calls" not in read:
            yield "tool_calls"
        if not any(name in read for name in REASONING_FIELDS):
            yield from (name for name in _REASONING if getattr(self, name))


class PredictionBody(StrictBody):
    """What the caller expects the answer to say, in whole or in part."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        """The content; its parts are concatenated."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    def ignored(self) -> Iterator[str]:
        """The names of what was sent and has no effect."""
        yield from super().ignored()
        if not isinstance(self.content, str):
            for part in self.content:
                yield from (f"content.{name}" for name in part.ignored())


class ReadFields(dict[str, Any]):
    """A message that adds each field that is read to ``read``. Iteration over all names or values adds nothing."""

    def __init__(self, fields: Mapping[str, Any], *, read: set[str]) -> None:
        super().__init__(fields)
        self._read = read

    def __getitem__(self, name: str) -> Any:
        """One field."""
        self._read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """One field, or a default."""
        self._read.add(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        """All names. Overridden so that code which copies the message reads each field by its name."""
        return super().__iter__()

    def items(self) -> Any:
        """All fields."""
        self._read.update(super().keys())
        return super().items()

    def __repr__(self) -> str:
        """All fields as a text, which a template may print."""
        self._read.update(super().keys())
        return super().__repr__()


def _name_in(value: Any, names: Collection[str]) -> str:
    """The value if it is one of the names; otherwise empty."""
    return value if isinstance(value, str) and value in names else ""


class ChatBody(GenerateBody):
    """Parameters of a chat completion."""

    neutral_values: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **GenerateBody.neutral_values,
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "web_search_options": (None,),
        "chat_template": (None,),
        "documents": (None, []),
    }

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT64)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    tools: list[ToolBody] | None = Field(None, max_length=MAX_NUM_TOOLS, fail_fast=True)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: int | None = Field(None, ge=0, le=2**31 - 1)
    include_reasoning: bool | None = None
    verbosity: str | None = None
    prediction: PredictionBody | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    _read: set[str] = PrivateAttr(default_factory=set)

    @property
    def read_fields(self) -> set[str]:
        """The fields of messages that the template has read."""
        return self._read

    def ignored(self) -> Iterator[str]:
        """The names of what was sent and has no effect."""
        yield from super().ignored()
        if self.prediction is not None:
            yield from (f"prediction.{name}" for name in self.prediction.ignored())

    def template_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the template should render: only those that may be called."""
        if not self.tools or self.tool_choice == "none":
            return None
        allowed = self.tool_choice.names if isinstance(self.tool_choice, AllowedChoiceBody) else None
        return [tool.plain() for tool in self.tools if allowed is None or tool.function.name in allowed]

    def template_parameters(self) -> dict[str, Any]:
        """The parameters that some templates read."""
        given: dict[str, Any] = {
            "reasoning_effort": self.reasoning_effort,
            "verbosity": self.verbosity,
            "enable_thinking": self.enable_thinking,
        }
        return {name: value for name, value in given.items() if value is not None}
