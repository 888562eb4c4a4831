"""The base of all bodies: nothing is coerced, and nothing is ignored silently."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from router.errors import UnsupportedParameterError

MAX_NUM_FIELDS = 256


class UnsupportedValueError(ValueError):
    """Carries an ``UnsupportedParameterError`` through validation, which adds the place of ``name`` in the body.

    If ``name`` is empty, the error concerns the object itself.
    """

    def __init__(self, name: str, *, kind: str = "", hint: str = "") -> None:
        self._name, self._kind, self._hint = name, kind, hint
        super().__init__(name)

    def refusal(self, place: Sequence[int | str]) -> UnsupportedParameterError:
        """The error, for an object at ``place`` in the body."""
        param = ".".join(str(part) for part in (*place, self._name) if part != "")
        return UnsupportedParameterError(param, kind=self._kind, hint=self._hint)


def with_few_fields(data: Any, limit: int = MAX_NUM_FIELDS) -> Any:
    """Limit the fields of an object, because each wrong field makes an error, and a body can hold very many."""
    if isinstance(data, dict) and len(data) > limit:
        raise ValueError(f"an object has {len(data)} fields, the limit is {limit}")
    return data


def _with_finite_numbers(data: dict[str, Any]) -> dict[str, Any]:
    """Refuse numbers that JSON cannot write: what clients send as NaN, and what is too large for a float."""
    try:
        json.dumps(data, allow_nan=False)
    except ValueError as error:
        raise ValueError("it has a number that is not finite, such as NaN or 1e999") from error
    return data


JsonObject: TypeAlias = Annotated[dict[str, Any], AfterValidator(_with_finite_numbers)]
"""An object that is written again as JSON: into an answer, a grammar or a prompt."""


def tell_values_without_effect(schema: dict[str, Any], model: type[StrictBody]) -> None:
    """Describe the fields without effect in a body's JSON schema."""
    for name, neutral in model.neutral_values.items():
        schema["properties"][name] = {
            "enum": list(neutral),
            "description": "Not supported. Accepted only with a value that changes nothing.",
        }
    for name in model.without_effect:
        schema["properties"][name]["description"] = "No effect; the header X-Baton-Ignored of the answer names it."


class StrictBody(BaseModel):
    """Nothing is coerced, and nothing is ignored silently.

    A parameter that we do not know is taken where it is null, as any that is not given.
    """

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, json_schema_extra=tell_values_without_effect
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
        data = with_few_fields(data)
        if not isinstance(data, dict) or cls.neutral_values.keys().isdisjoint(data):
            return data
        kept = dict(data)
        for name, neutral in cls.neutral_values.items():
            if name in kept:
                value = kept.pop(name)
                if not any(type(value) is type(item) and value == item for item in neutral):
                    raise UnsupportedValueError(name)
        return kept
