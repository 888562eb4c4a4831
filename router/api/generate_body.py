"""What chat and text completions have in common in their bodies: sampling, stopping, streaming."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from router.errors import UnsupportedParameterError

MAX_INT64 = 2**63 - 1
MAX_NUM_FIELDS = 256
MAX_NUM_BIASES = 1024
MAX_NUM_BAD_WORDS = 1024

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
BiasKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
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


def _with_few_biases(data: Any) -> Any:
    return _with_few_fields(data, MAX_NUM_BIASES)


def _tell_neutral_values(schema: dict[str, Any], model: type[StrictBody]) -> None:
    for name, neutral in model.neutral_values.items():
        schema["properties"][name] = {
            "enum": list(neutral),
            "description": "Not supported; taken where it changes nothing.",
        }


class StrictBody(BaseModel):
    """Nothing is coerced and nothing is ignored (I6)."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra=_tell_neutral_values)

    neutral_values: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Parameters that we know and do not support, with the values that change nothing."""

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
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
        "spaces_between_special_tokens": (None, True),
    }

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
    logit_bias: Annotated[dict[BiasKey, Bias], BeforeValidator(_with_few_biases)] | None = None
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1, fail_fast=True)
    bad_words: list[BadWord] | None = Field(None, max_length=MAX_NUM_BAD_WORDS, fail_fast=True)
    prompt_logprobs: NumLogprobs | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1, le=MAX_INT64)] | Literal[-1] | None = None
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(_with_few_fields)] | None = None
