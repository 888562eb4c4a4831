"""How a parameter of a logits processor is declared: one field says what requests may give, and what the engine gets.

The bodies of the API, the OpenAPI document and the way from a body to ``SamplingParams`` derive from the declarations.
Free of torch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn, Protocol


class Vocabulary(Protocol):
    """What a router knows of the model's tokens, for values that name some."""

    def check(self, token_ids: Sequence[int], *, param: str) -> None:
        """Refuse the request where a token id is none of the model's; ``param`` gets the blame."""

    def has(self, token_ids: Sequence[int]) -> bool:
        """Whether the model has all of these: a tokenizer may know others behind them."""

    async def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, without special tokens."""

    def refuse(self, reason: str, *, param: str) -> NoReturn:
        """Refuse the request because of what a value of ``param`` means in tokens."""


ReadValue = Callable[[Any, Vocabulary], Awaitable[Any]]
"""From the value in a body, which was checked, to that of ``SamplingParams``. Raises what ``Vocabulary`` does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestField:
    """How requests give a parameter. Its name in bodies is that of its field.

    schema: the type of the value in a body, with its limits, as pydantic reads it.
    read: None takes the value as it is.
    in_generation_config: where a body says nothing, the model's generation_config.json may.
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
    """The parameters that a dataclass declares for requests, by their names."""
    return {item.name: item.metadata["request"] for item in fields(kind) if "request" in item.metadata}
