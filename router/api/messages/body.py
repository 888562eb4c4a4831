"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from router.api.bodies.callers_tool import CallersTool
from router.api.bodies.generate_body import MAX_INT64, SamplingBody
from router.api.bodies.strict_body import JsonObject, StrictBody, UnsupportedValueError
from router.api.bodies.tools_body import MAX_NUM_TOOLS, CallId, ToolName
from router.api.messages.context_management import ContextManagement

_CACHE = frozenset({"cache_control"})
_OF_CONVERSATIONS = _CACHE | {"context_management"}


class TextBlock(StrictBody):
    """A text."""

    without_effect: ClassVar[frozenset[str]] = _CACHE | {"citations"}

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None
    citations: list[Any] | None = None


class ThinkingBlock(StrictBody):
    """Reasoning of the model. Signatures are not checked, because Baton makes none."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(StrictBody):
    """Encrypted reasoning of a model on another server, which only that server can read."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"data"})

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(StrictBody):
    """The model called a tool."""

    neutral_values: ClassVar[Mapping[str, tuple[object, ...]]] = {"caller": (None, {"type": "direct"})}
    without_effect: ClassVar[frozenset[str]] = _CACHE

    type: Literal["tool_use"]
    id: CallId
    name: ToolName
    input: JsonObject
    cache_control: dict[str, Any] | None = None


def _refuse_blocks_but(*known: str) -> BeforeValidator:
    """Blocks of other kinds are refused by their names."""

    def check(data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind not in known:
            raise UnsupportedValueError("", kind=kind[:40], hint=f"use blocks of the types {', '.join(known)}")
        return data

    return BeforeValidator(check)


def _form_of(content: Any) -> str:
    return "~blocks" if isinstance(content, list) else "~text"


def _kind_of(block: Any) -> str:
    return f"~{block.get('type') if isinstance(block, dict) else getattr(block, 'type', None)}"


Texts: TypeAlias = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[list[Annotated[TextBlock, _refuse_blocks_but("text")]], Field(fail_fast=True), Tag("~blocks")],
    Discriminator(_form_of),
]


class ToolResultBlock(StrictBody):
    """What a tool returned. If that is an error, the text must say so."""

    without_effect: ClassVar[frozenset[str]] = _CACHE | {"is_error"}

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: Texts | None = None
    is_error: bool | None = None
    cache_control: dict[str, Any] | None = None


_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")

ContentBlock: TypeAlias = Annotated[
    Annotated[
        Annotated[TextBlock, Tag("~text")]
        | Annotated[ThinkingBlock, Tag("~thinking")]
        | Annotated[RedactedThinkingBlock, Tag("~redacted_thinking")]
        | Annotated[ToolUseBlock, Tag("~tool_use")]
        | Annotated[ToolResultBlock, Tag("~tool_result")],
        Discriminator(
            _kind_of,
            custom_error_type="block_type",
            custom_error_message=f"Input should be an object with one of the types {', '.join(_BLOCKS)}",
        ),
    ],
    _refuse_blocks_but(*_BLOCKS),
]


class MessageParam(StrictBody):
    """One turn. The answer continues a last turn of the assistant. Instructions may have the role ``system``."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("~text")]
        | Annotated[list[ContentBlock], Field(min_length=1, fail_fast=True), Tag("~blocks")],
        Discriminator(_form_of),
    ]

    @model_validator(mode="after")
    def _has_its_own_blocks(self) -> MessageParam:
        misplaced = {"user": ("tool_use", "thinking"), "assistant": ("tool_result",)}.get(self.role, _BLOCKS[1:])
        blocks = [] if isinstance(self.content, str) else self.content
        for block in blocks:
            if block.type in misplaced:
                raise ValueError(f"a message with the role {self.role!r} cannot have {block.type} blocks")
        if (num_calls := sum(block.type == "tool_use" for block in blocks)) > MAX_NUM_TOOLS:
            raise ValueError(f"a message has {num_calls} tool_use blocks, the limit is {MAX_NUM_TOOLS}")
        return self


class Tool(CallersTool):
    """A tool that the caller runs."""

    own_type = "custom"
    hint = "use tools with an input_schema"
    without_effect: ClassVar[frozenset[str]] = _CACHE | {"eager_input_streaming", "input_examples"}

    type: Literal["custom"] | None = None
    input_schema: JsonObject
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[Any] | None = None


class ToolChoice(StrictBody):
    """Whether tools are called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_a_tool(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("'name' is required with type 'tool', and not allowed with other types")
        return self


class Thinking(StrictBody):
    """Whether the model thinks before it answers, and for how many tokens at most."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"display"})

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=1, le=MAX_INT64)
    display: str | None = None


class OutputFormat(StrictBody):
    """The answer's text is JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(StrictBody):
    """The effort of the model, and the format of its answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class _Conversation(StrictBody):
    """What a prompt is made of."""

    neutral_values: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "container": (None,),
        "mcp_servers": (None, []),
        "thread": (None,),
    }

    messages: list[MessageParam] = Field(min_length=1, fail_fast=True)
    system: Texts | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_NUM_TOOLS, fail_fast=True)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: JsonObject | None = None
    context_management: ContextManagement | None = None
    cache_control: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _has_one_form(self) -> _Conversation:
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise ValueError("output_format is an older name of output_config.format: send only one of them")
        return self

    def ignored(self) -> Iterator[str]:
        """The names of what was sent and has no effect."""
        yield from super().ignored()
        for message in self.messages:
            yield from (f"messages.content.{name}" for name in _ignored_of(message.content))
        yield from (f"system.{name}" for name in _ignored_of(self.system))
        for tool in self.tools or ():
            yield from (f"tools.{name}" for name in tool.ignored())
        if self.thinking is not None:
            yield from (f"thinking.{name}" for name in self.thinking.ignored())


def _ignored_of(content: Any) -> Iterator[str]:
    if not isinstance(content, list):
        return
    for block in content:
        yield from block.ignored()
        if isinstance(block, ToolResultBlock):
            yield from (f"content.{name}" for name in _ignored_of(block.content))


class CountTokensBody(_Conversation):
    """A conversation whose tokens are counted."""

    without_effect: ClassVar[frozenset[str]] = _OF_CONVERSATIONS

    model: str | None = None


class MessagesBody(_Conversation, SamplingBody):
    """Parameters of a message. Sampling parameters that Anthropic's API lacks are named as for chats."""

    without_effect: ClassVar[frozenset[str]] = _OF_CONVERSATIONS | {
        "diagnostics",
        "inference_geo",
        "metadata",
        "service_tier",
        "speed",
    }

    max_tokens: int = Field(ge=1, le=MAX_INT64)
    stop_sequences: list[str] | None = Field(None, fail_fast=True)
    diagnostics: dict[str, Any] | None = None
    inference_geo: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    speed: str | None = None
