"""The body of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, Tag

from engine.contract.logits_params import TokenId
from router.api.bodies.generate_body import MAX_INT64, GenerateBody, NumLogprobs, form_of

TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]

MAX_NUM_PROMPTS = 65_536
"""More prompts are not even validated; the setting ``max_num_choices`` bounds how many are answered."""


def _form(prompt: Any) -> str | None:
    """The form that a prompt has, so that errors about the other forms, which would mislead, are left out."""
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    if isinstance(first, str):
        return "~texts"
    return "~batches" if isinstance(first, list) else form_of(prompt, text="~text", items="~ids")


Prompt = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[TokenIds, Tag("~ids")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_NUM_PROMPTS, fail_fast=True), Tag("~texts")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_NUM_PROMPTS, fail_fast=True), Tag("~batches")],
    Discriminator(
        _form,
        custom_error_type="prompt_type",
        custom_error_message="Input should be a valid string, a list of strings, a list of token ids or a list of such "
        "lists",
    ),
]
"""One text, one list of token ids, or a batch of either. Validation ends at the first wrong item, because a list of
millions could otherwise make as many errors."""


class CompletionBody(GenerateBody):
    """Parameters of a text completion. ``prompt`` is one text, one list of token ids, or a batch of either.

    With ``echo``, ``max_tokens`` may be 0; then nothing is generated.
    """

    neutral_values: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **GenerateBody.neutral_values,
        "suffix": (None, ""),
    }

    prompt: Prompt
    max_tokens: int | None = Field(None, ge=0, le=MAX_INT64)
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
