"""One row of the parity matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NUM_TOKENS = 12
"""Tokens of an answer: enough to lose a worker in the middle."""

TEXT = "a baton goes from one runner to the next, and on, until the last of them has crossed the line"
"""About 90 tokens: several blocks, and several steps if prompts are computed in chunks of 32."""

MESSAGES = [{"role": "user", "content": TEXT}]

COMPLETION: Mapping[str, Any] = {
    "prompt": TEXT,
    "max_tokens": NUM_TOKENS,
    "temperature": 0,
    "logprobs": 1,
    "return_token_ids": True,
}
CHAT: Mapping[str, Any] = {
    "messages": MESSAGES,
    "max_tokens": NUM_TOKENS,
    "temperature": 0,
    "logprobs": True,
    "top_logprobs": 1,
    "return_token_ids": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """Fields of a request's body, in addition to those that every row sends.

    ``is_chat``: the row goes to the chat endpoint.
    ``needs``: what the feature is seen against; the row sends it too, and the plain answer to compare with is its.
    ``same_answer``: why the answer is the one without the feature, where it is.
    ``is_computed_anew``: prompts of such requests are read from no cache, as what is said of their tokens is in none.
    """

    name: str
    fields: Mapping[str, Any]
    needs: Mapping[str, Any] = field(default_factory=dict)
    is_chat: bool = False
    same_answer: str = ""
    is_computed_anew: bool = False

    @property
    def url(self) -> str:
        """The endpoint."""
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    @property
    def is_beam_search(self) -> bool:
        """True if its outputs are found by beam search."""
        return bool(self.fields.get("beam_width") or self.fields.get("use_beam_search"))

    @property
    def has_grammar(self) -> bool:
        """True if a grammar says which tokens its outputs may have."""
        return not self.body.keys().isdisjoint(("response_format", "structured_outputs", "tools"))

    @property
    def plain_body(self) -> dict[str, Any]:
        """The body without the feature."""
        return {**(CHAT if self.is_chat else COMPLETION), **self.needs}

    @property
    def body(self) -> dict[str, Any]:
        """The body with it."""
        return {**self.plain_body, **self.fields}
