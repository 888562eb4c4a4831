"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from router.api.generate_body import GenerateBody, TokenId

TokenIds = Annotated[list[TokenId], Field(min_length=1)]


class CompletionBody(GenerateBody):
    """Parameters of a text completion. ``prompt`` is one text, one list of token ids, or a batch of either."""

    neutral_values: ClassVar[dict[str, tuple[object, ...]]] = {
        **GenerateBody.neutral_values,
        "logprobs": (None,),
        "suffix": (None, ""),
    }

    prompt: str | TokenIds | Annotated[list[str], Field(min_length=1)] | Annotated[list[TokenIds], Field(min_length=1)]
    echo: bool | None = None
    add_special_tokens: bool | None = None
