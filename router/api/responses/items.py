"""The items of a conversation as /v1/responses has them: messages, calls of functions and their results, reasoning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter, model_validator

from router.api.bodies.strict_body import StrictBody, UnsupportedValueError
from router.api.bodies.tools_body import CallId, ToolName

_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
_ITEMS = frozenset({"message", "function_call", "function_call_output", "reasoning"})


class TextPart(StrictBody):
    """A part of a message, or of a function's result. Images, files and audio are not supported."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_parts(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind not in _TEXT_PARTS:
            raise UnsupportedValueError("", kind=kind[:40], hint="send text parts only")
        return data


def _form_of(content: Any) -> str:
    return "~parts" if isinstance(content, list) else "~text"


Content = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[TextPart], Field(fail_fast=True), Tag("~parts")],
    Discriminator(_form_of),
]


class Item(StrictBody):
    """What every item may have, so that what an answer has can be sent back as it is."""

    neutral_values: ClassVar[Mapping[str, tuple[object, ...]]] = {"namespace": (None,), "caller": (None,)}
    without_effect: ClassVar[frozenset[str]] = frozenset({"phase", "encrypted_content", "created_by"})

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: str | None = None
    encrypted_content: str | None = None
    created_by: str | None = None


class MessageItem(Item):
    """A message of the user, of the model, or with instructions."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCallItem(Item):
    """The model called a function."""

    type: Literal["function_call"]
    call_id: CallId
    name: ToolName
    arguments: str


class FunctionCallOutputItem(Item):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Content
    name: str | None = None


class SummaryPart(StrictBody):
    """A summary of reasoning, as other servers make them."""

    type: Literal["summary_text"]
    text: str


class ReasoningPart(StrictBody):
    """A part of the model's reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Item):
    """Reasoning of the model."""

    type: Literal["reasoning"]
    summary: list[SummaryPart] | None = None
    content: list[ReasoningPart] | None = None


def _known(data: Any) -> Any:
    """An item of a kind that can be served; others are refused by their names."""
    kind = data.get("type") if isinstance(data, dict) else None
    if isinstance(kind, str) and kind not in _ITEMS:
        hint = "send the item itself" if kind == "item_reference" else "use messages, function calls and reasoning"
        raise UnsupportedValueError("", kind=kind[:40], hint=hint)
    return data


def _kind_of(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return f"~{kind or 'message'}"


InputItem: TypeAlias = Annotated[
    Annotated[
        Annotated[MessageItem, Tag("~message")]
        | Annotated[FunctionCallItem, Tag("~function_call")]
        | Annotated[FunctionCallOutputItem, Tag("~function_call_output")]
        | Annotated[ReasoningItem, Tag("~reasoning")],
        Discriminator(
            _kind_of,
            custom_error_type="item_type",
            custom_error_message=f"Input should be an object with one of the types {', '.join(sorted(_ITEMS))}",
        ),
    ],
    BeforeValidator(_known),
]

ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])
"""Reads items that were stored."""


def text_of(content: str | Sequence[TextPart]) -> str:
    """The text of a content; the texts of parts become lines."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def ignored_of(items: Iterable[InputItem]) -> Iterator[str]:
    """The names of fields in items that have no effect."""
    for item in items:
        yield from item.ignored()
        content = getattr(item, "content", None)
        if isinstance(content, list):
            for part in content:
                yield from (f"content.{name}" for name in part.ignored())


def chat_messages(items: Iterable[InputItem]) -> list[dict[str, Any]]:
    """Convert the items to a chat's messages: reasoning and calls become part of the assistant's turn around them."""
    messages: list[dict[str, Any]] = []
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                turn = _assistant_turn(messages, is_open=_has_only_reasoning)
                turn["content"] = text_of(item.content)
            case MessageItem():
                messages.append({"role": item.role, "content": text_of(item.content)})
            case ReasoningItem():
                texts = [part.text for part in item.content or item.summary or ()]
                if texts:
                    messages.append({"role": "assistant", "content": None, "reasoning_content": "\n".join(texts)})
            case FunctionCallItem():
                turn = _assistant_turn(messages, is_open=lambda _: True)
                function = {"name": item.name, "arguments": item.arguments}
                turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
            case FunctionCallOutputItem():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
    return messages


def _has_only_reasoning(message: Mapping[str, Any]) -> bool:
    return message["content"] is None and "tool_calls" not in message


def _assistant_turn(messages: list[dict[str, Any]], *, is_open: Any) -> dict[str, Any]:
    """The last message if it is the assistant's and still open; otherwise a new one."""
    if not messages or messages[-1]["role"] != "assistant" or not is_open(messages[-1]):
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def stored_item(item: InputItem, *, item_id: str) -> dict[str, Any]:
    """An item in the form in which it is listed later: with an id, a status, and its content in parts."""
    plain: dict[str, Any] = {"id": item.id or item_id, "type": item.type or "message", "status": "completed"}
    match item:
        case MessageItem(role="assistant"):
            part = {"type": "output_text", "text": text_of(item.content), "annotations": []}
            return plain | {"role": item.role, "content": [part]}
        case MessageItem():
            return plain | {"role": item.role, "content": [{"type": "input_text", "text": text_of(item.content)}]}
        case FunctionCallItem():
            return plain | {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        case FunctionCallOutputItem():
            return plain | {"call_id": item.call_id, "output": text_of(item.output)}
        case ReasoningItem():
            told = item.model_dump(include={"summary", "content"}, exclude_none=True)
            return plain | {"summary": [], **told}
