"""What chat and text completions have in common in their bodies: sampling, stopping, streaming."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from router.api.request_id import MAX_CHARACTERS, is_request_id
from router.errors import UnsupportedParameterError

MAX_INT64 = 2**63 - 1
MAX_NUM_FIELDS = 256
MAX_NUM_BIASES = 1024
MAX_NUM_BAD_WORDS = 1024

TOKEN_ID_PATTERN = r"^(0|[1-9][0-9]{0,9})$"
MAX_NUM_NAMED_KEYS = 5

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
BiasKey = Annotated[str, Field(pattern=TOKEN_ID_PATTERN)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
BadWord = Annotated[str, Field(min_length=1, max_length=1000)]
NumLogprobs = Annotated[int, Field(ge=-1, le=2**31 - 1)]


class UnsupportedValueError(ValueError):
    """Carries an ``UnsupportedParameterError`` through the validation, which knows where in the body ``name`` is.

    The object itself is meant where ``name`` is empty.
    """

    def __init__(self, name: str, *, kind: str = "", hint: str = "") -> None:
        self._name, self._kind, self._hint = name, kind, hint
        super().__init__(name)

    def refusal(self, place: Sequence[int | str]) -> UnsupportedParameterError:
        """The error, for an object at ``place`` in the body."""
        param = ".".join(str(part) for part in (*place, self._name) if part != "")
        return UnsupportedParameterError(param, kind=self._kind, hint=self._hint)


def _with_few_fields(data: Any, limit: int = MAX_NUM_FIELDS) -> Any:
    """Each wrong field would make an error of its own, and a body has room for many."""
    if isinstance(data, dict) and len(data) > limit:
        raise ValueError(f"an object has {len(data)} fields, the limit is {limit}")
    return data


def _with_token_keys(data: Any) -> Any:
    """A few biases whose keys are token ids; the keys that are none are named."""
    data = _with_few_fields(data, MAX_NUM_BIASES)
    wrong = [key for key in data if not re.match(TOKEN_ID_PATTERN, str(key))] if isinstance(data, dict) else []
    if wrong:
        named = ", ".join(repr(str(key)[:40]) for key in wrong[:MAX_NUM_NAMED_KEYS])
        rest = f" and {len(wrong) - MAX_NUM_NAMED_KEYS} more" if len(wrong) > MAX_NUM_NAMED_KEYS else ""
        raise ValueError(f"its keys must be token ids such as '50', got {named}{rest}")
    return data


def _as_request_id(text: str) -> str:
    if not is_request_id(text):
        raise ValueError(f"it must be 1 to {MAX_CHARACTERS} visible ASCII characters, got {text[:40]!r}")
    return text


def _tell_values_without_effect(schema: dict[str, Any], model: type[StrictBody]) -> None:
    for name, neutral in model.neutral_values.items():
        schema["properties"][name] = {
            "enum": list(neutral),
            "description": "Not supported; taken where it changes nothing.",
        }
    for name in model.without_effect:
        schema["properties"][name]["description"] = "Taken, without effect; the header X-Baton-Ignored names it."


class StrictBody(BaseModel):
    """Nothing is coerced, and nothing is ignored silently.

    A parameter that we do not know is taken where it is null, as any that is not given.
    """

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, json_schema_extra=_tell_values_without_effect
    )
    __pydantic_extra__: dict[str, None]

    neutral_values: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Parameters that we know and do not support, with the values that change nothing."""

    without_effect: ClassVar[frozenset[str]] = frozenset()
    """Fields that clients send and that change no answer: they are named in a header of the answer."""

    def ignored(self) -> Iterator[str]:
        """The names of what was sent and has no effect."""
        yield from (name for name in self.without_effect & self.model_fields_set if getattr(self, name))
        yield from self.__pydantic_extra__

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        data = _with_few_fields(data)
        if not isinstance(data, dict) or cls.neutral_values.keys().isdisjoint(data):
            return data
        kept = dict(data)
        for name, neutral in cls.neutral_values.items():
            if name in kept:
                value = kept.pop(name)
                if not any(type(value) is type(item) and value == item for item in neutral):
                    raise UnsupportedValueError(name)
        return kept


class StreamOptions(StrictBody):
    """What a stream carries besides text."""

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
        """Whether each event tells the usage so far: not where no usage is wanted."""
        return bool(self.continuous_usage_stats) and self.include_usage is not False


class GenerateBody(StrictBody):
    """Parameters of both endpoints. A value of None is the same as none."""

    neutral_values: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "use_beam_search": (None, False),
        "length_penalty": (None, 1, 1.0),
        "guided_json": (None,),
        "guided_regex": (None,),
        "guided_choice": (None,),
        "guided_grammar": (None,),
        "structured_outputs": (None,),
        "response_format": (None, {"type": "text"}),
        "spaces_between_special_tokens": (None, True),
    }
    without_effect: ClassVar[frozenset[str]] = frozenset(
        {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"}
    )

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT64)
    min_tokens: int | None = Field(None, ge=0, le=MAX_INT64)
    temperature: float | None = Field(None, ge=0.0, le=100.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    seed: int | None = Field(None, ge=-MAX_INT64 - 1, le=MAX_INT64)
    n: int | None = Field(None, ge=1)
    best_of: int | None = Field(None, ge=1)
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    repetition_penalty: float | None = Field(None, gt=0.0, le=100.0)
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=1024, fail_fast=True)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Annotated[dict[BiasKey, Bias], BeforeValidator(_with_token_keys)] | None = None
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1, fail_fast=True)
    bad_words: list[BadWord] | None = Field(None, max_length=MAX_NUM_BAD_WORDS, fail_fast=True)
    prompt_logprobs: NumLogprobs | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1, le=MAX_INT64)] | Literal[-1] | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    request_id: Annotated[str, AfterValidator(_as_request_id)] | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(_with_few_fields)] | None = None
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
