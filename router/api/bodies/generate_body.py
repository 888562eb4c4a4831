"""What chat and text completions have in common in their bodies: sampling, stopping, streaming."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from engine.contract.logits_params import TokenId
from engine.contract.messages import SamplingParams
from engine.contract.promise import MAX_PROMISE_MS
from engine.contract.request_fields import request_fields
from router.api.bodies.answer_shape import Choices, Lark, Pattern, ResponseFormat, Schema, StructuredOutputs
from router.api.bodies.processor_fields import with_fields_of
from router.api.bodies.strict_body import StrictBody, with_few_fields
from router.api.request_id import MAX_CHARACTERS, is_request_id

MAX_INT64 = 2**63 - 1

NumLogprobs = Annotated[int, Field(ge=-1, le=2**31 - 1)]


def form_of(value: Any, *, text: str, items: str) -> str | None:
    """For a value that may be a text or a list: the name of the form that it has; None if it has neither."""
    if isinstance(value, list):
        return items
    return text if isinstance(value, str) else None


Stops = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[str], Field(fail_fast=True), Tag("~texts")],
    Discriminator(
        lambda value: form_of(value, text="~text", items="~texts"),
        custom_error_type="stop_type",
        custom_error_message="Input should be a valid string or a list of strings",
    ),
]


def _as_request_id(text: str) -> str:
    if not is_request_id(text):
        raise ValueError(f"it must be 1 to {MAX_CHARACTERS} visible ASCII characters, got {text[:40]!r}")
    return text


Milliseconds = Annotated[float, Field(gt=0.0, le=MAX_PROMISE_MS, allow_inf_nan=False)]


class SLOBody(StrictBody):
    """The latencies that the caller asks for, in milliseconds: to the first token, and between later tokens."""

    ttft_ms: Milliseconds | None = None
    itl_ms: Milliseconds | None = None


class StreamOptions(StrictBody):
    """What a stream contains besides text."""

    neutral_values: ClassVar[Mapping[str, tuple[object, ...]]] = {"include_obfuscation": (None, False)}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    def ignored(self) -> Iterator[str]:
        """The names of what was sent and has no effect."""
        yield from super().ignored()
        if self.continuous_usage_stats and not self.sends_running_usage:
            yield "continuous_usage_stats"

    @property
    def sends_running_usage(self) -> bool:
        """True if each event has the usage so far; never if no usage is wanted."""
        return bool(self.continuous_usage_stats) and self.include_usage is not False


if TYPE_CHECKING:
    ProcessorBody = StrictBody
else:
    ProcessorBody = with_fields_of(SamplingParams, StrictBody)


class SamplingBody(ProcessorBody):
    """What every generation can be asked for, under the same names at every endpoint. None is the same as not given.

    ``params`` is what becomes of it: its bases declare the fields that are not written here.
    """

    params: ClassVar[type[SamplingParams]] = SamplingParams

    model: str | None = None
    min_tokens: int | None = Field(None, ge=0, le=MAX_INT64)
    temperature: float | None = Field(None, ge=0.0, le=100.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    seed: int | None = Field(None, ge=-MAX_INT64 - 1, le=MAX_INT64)
    stop_token_ids: list[TokenId] | None = Field(None, max_length=1024, fail_fast=True)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)
    slo: SLOBody | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    stream: bool | None = None
    request_id: Annotated[str, AfterValidator(_as_request_id)] | None = None

    def shared_fields(self) -> dict[str, Any]:
        """What every endpoint takes, by name."""
        return {name: getattr(self, name) for name in (*SamplingBody.model_fields, *request_fields(self.params))}


class GenerateBody(SamplingBody):
    """Parameters of chat and text completions."""

    neutral_values: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "spaces_between_special_tokens": (None, True),
    }
    without_effect: ClassVar[frozenset[str]] = frozenset(
        {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"}
    )

    max_tokens: int | None = Field(None, ge=1, le=MAX_INT64)
    n: int | None = Field(None, ge=1)
    best_of: int | None = Field(None, ge=1)
    use_beam_search: bool | None = None
    beam_width: int | None = Field(None, ge=1)
    length_penalty: float | None = Field(None, ge=-5.0, le=5.0)
    early_stopping: bool | Literal["never"] | None = None
    stop: Stops | None = None
    include_stop_str_in_output: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Lark | None = None
    prompt_logprobs: NumLogprobs | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1, le=MAX_INT64)] | Literal[-1] | None = None
    truncation_side: Literal["left", "right"] | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(with_few_fields)] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    user: str | None = None

    def ignored(self) -> Iterator[str]:
        """The names of what was sent and has no effect."""
        yield from super().ignored()
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            yield "truncation_side"
        if self.stream_options is not None:
            yield from (f"stream_options.{name}" for name in self.stream_options.ignored())
