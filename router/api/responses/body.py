"""The body of POST /v1/responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from router.api.bodies.callers_tool import CallersTool
from router.api.bodies.generate_body import MAX_INT64, NumLogprobs, SamplingBody, Stops, StreamOptions
from router.api.bodies.strict_body import JsonObject, StrictBody
from router.api.bodies.tools_body import MAX_NUM_TOOLS, choice_form
from router.api.responses.items import InputItem, ignored_of

MAX_NUM_METADATA = 16
LOGPROBS = "message.output_text.logprobs"


class Reasoning(StrictBody):
    """How much the model reasons. Its reasoning is returned in full, never summarized."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"summary", "generate_summary"})

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextFormat(StrictBody):
    """The format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(StrictBody):
    """The format and the verbosity of the answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = None


def _refuse_form_of_chats(data: Any) -> None:
    if isinstance(data, dict) and "function" in data and "name" not in data:
        raise ValueError(
            "in responses the tool's name and its other fields belong beside 'type', not into an object 'function'"
        )


class FunctionTool(CallersTool):
    """A function that the model may call."""

    own_type = "function"
    hint = "use tools of type 'function'"
    without_effect: ClassVar[frozenset[str]] = frozenset({"output_schema"})

    type: Literal["function"]
    parameters: JsonObject | None = None
    output_schema: JsonObject | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_forms(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if kind == cls.own_type:
            _refuse_form_of_chats(data)
        return data


class ToolName(StrictBody):
    """One function by name."""

    type: Literal["function"]
    name: str

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_forms(cls, data: Any) -> Any:
        _refuse_form_of_chats(data)
        return data


class AllowedTools(StrictBody):
    """Some of the tools. The answer may (``auto``) or must (``required``) call any of them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ToolName] = Field(min_length=1, fail_fast=True)


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("~mode")]
    | Annotated[ToolName, Tag("~named")]
    | Annotated[AllowedTools, Tag("~allowed")],
    Discriminator(choice_form),
]

Input = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[InputItem], Field(min_length=1, fail_fast=True), Tag("~items")],
    Discriminator(lambda value: "~items" if isinstance(value, list) else "~text"),
]


class ResponsesBody(SamplingBody):
    """Parameters of a response. Sampling parameters that OpenAI's API lacks here are named as for chats."""

    neutral_values: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "background": (None, False),
        "conversation": (None,),
        "prompt": (None,),
        "context_management": (None, []),
        "moderation": (None,),
    }
    without_effect: ClassVar[frozenset[str]] = frozenset(
        {
            "max_tool_calls",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "user",
        }
    )

    input: Input
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_INT64)
    metadata: dict[str, str] | None = Field(None, max_length=MAX_NUM_METADATA)
    include: list[str] | None = Field(None, max_length=32)
    top_logprobs: NumLogprobs | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=MAX_NUM_TOOLS, fail_fast=True)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stop: Stops | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        """True if the text should have log-probabilities."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def ignored(self) -> Iterator[str]:
        """The names of what was sent and has no effect."""
        yield from super().ignored()
        yield from (f"include.{name}" for name in self.include or () if name != LOGPROBS)
        for name in ("reasoning", "text", "stream_options"):
            options = getattr(self, name)
            if options is not None:
                yield from (f"{name}.{item}" for item in options.ignored())
        if self.text is not None and self.text.format is not None:
            yield from (f"text.format.{name}" for name in self.text.format.ignored())
        for tool in self.tools or ():
            yield from (f"tools.{name}" for name in tool.ignored())
        if not isinstance(self.input, str):
            yield from (f"input.{name}" for name in ignored_of(self.input))
