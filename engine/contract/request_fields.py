"""Declares a parameter of a logits processor: one field defines what requests may give, and what the engine gets.

The API's bodies, the OpenAPI document and the conversion from a body to ``SamplingParams`` derive from these
declarations. Free of torch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn, Protocol


class Vocabulary(Protocol):
    """What a router knows of the model's tokens, to check and convert values that name tokens."""

    def check(self, token_ids: Sequence[int], *, param: str) -> None:
        """Refuse the request if the model lacks one of these token ids; the error names ``param``."""

    def has(self, token_ids: Sequence[int]) -> bool:
        """True when the model has all of these tokens; a tokenizer may know more tokens than the model."""

    async def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, without special tokens."""

    def refuse(self, reason: str, *, param: str) -> NoReturn:
        """Refuse the request because the value of ``param``, turned into tokens, is not acceptable."""


ReadValue = Callable[[Any, Vocabulary], Awaitable[Any]]
"""Converts the checked value of a body to that of ``SamplingParams``. Raises what ``Vocabulary`` raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestField:
    """How requests give a parameter. Its name in bodies is the name of the field.

    schema: the type of the value in a body, with its limits, as pydantic reads it.
    read: converts the value; None takes it as it is.
    in_generation_config: the model's generation_config.json may give the value, a number within the limits of
        ``schema``, where a body gives none.
    """

    schema: Any
    default: Any
    read: ReadValue | None = None
    in_generation_config: bool = False


def request_field(
    default: Any, schema: Any, *, read: ReadValue | None = None, in_generation_config: bool = False
) -> Any:
    """Declare a parameter as a field of a dataclass; see ``RequestField``. ``default`` changes no logits."""
    told = RequestField(schema=schema, default=default, read=read, in_generation_config=in_generation_config)
    return field(default=default, metadata={"request": told})


def request_fields(kind: type) -> Mapping[str, RequestField]:
    """The parameters that a dataclass declares for requests, by name."""
    return {item.name: item.metadata["request"] for item in fields(kind) if "request" in item.metadata}
