"""What a model's own files say about generation: end-of-text tokens and sampling defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from engine.contract.checkpoint.end_tokens import read_end_tokens
from engine.contract.errors import CheckpointError
from engine.contract.messages import SamplingParams
from engine.contract.request_fields import request_fields
from router.errors import ModelDirectoryError
from router.text.tokenizer import read_json

_LIMITS: Final[Mapping[str, Any]] = {
    "temperature": Annotated[float, Field(ge=0.0, le=100.0)],
    "top_p": Annotated[float, Field(ge=0.0, le=1.0)],
    "top_k": Annotated[float, Field(ge=-1.0, le=2.0**31 - 1.0)],
    "min_p": Annotated[float, Field(ge=0.0, le=1.0)],
}
"""The values that may be there: those that requests may give, and a ``top_p`` of 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Values used where a request sets none. Without a generation_config.json they are OpenAI's: temperature 1.

    ``do_sample: false`` there asks for greedy decoding, as it does in transformers. ``logits`` are parameters of logits
    processors, by their names.
    """

    eos_token_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    logits: Mapping[str, float] = field(default_factory=dict)


def load_generation_defaults(model_dir: Path, *, params: type[SamplingParams] = SamplingParams) -> GenerationDefaults:
    """Read the defaults from generation_config.json, and the end-of-text tokens by ``read_end_tokens``.

    Raises:
        ModelDirectoryError: A value has the wrong type, or is none that a request may give.
    """
    config = read_json(model_dir / "generation_config.json")
    try:
        eos_token_ids = read_end_tokens(model_dir)
    except CheckpointError as error:
        raise ModelDirectoryError(str(error)) from error
    return GenerationDefaults(
        eos_token_ids=eos_token_ids,
        temperature=0.0 if config.get("do_sample") is False else _number(config, "temperature", 1.0, model_dir),
        top_p=_number(config, "top_p", 1.0, model_dir),
        top_k=int(_number(config, "top_k", 0, model_dir)),
        min_p=_number(config, "min_p", 0.0, model_dir),
        logits={
            name: _number(config, name, told.default, model_dir, limits=told.schema)
            for name, told in request_fields(params).items()
            if told.in_generation_config
        },
    )


def _number(config: Mapping[str, object], name: str, default: float, model_dir: Path, *, limits: Any = None) -> Any:
    """A value of the type and within the limits that a request's parameter has."""
    value = config.get(name)
    if value is None:
        return default
    file = model_dir / "generation_config.json"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ModelDirectoryError(f"{file}: {name} must be a number, got {value!r}")
    try:
        return TypeAdapter(limits or _LIMITS[name], config=ConfigDict(allow_inf_nan=False)).validate_python(value)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Input ")
        raise ModelDirectoryError(f"{file}: {name} {reason}, got {value!r}") from error
