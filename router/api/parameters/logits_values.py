"""From what a body says of the logits to the values of ``SamplingParams``, by the declarations of its fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.contract.request_fields import request_fields
from router.api.bodies.generate_body import GenerateBody
from router.api.prompts import check_vocabulary, encode_all
from router.service import RouterService


class _Vocabulary:
    """Implements ``Vocabulary`` by a router's tokenizer."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    def check(self, token_ids: Sequence[int], *, param: str) -> None:
        """See ``Vocabulary``; raises InvalidRequestError."""
        check_vocabulary(token_ids, self._service.vocab_size(), param=param)

    async def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """See ``Vocabulary``."""
        return await encode_all(self._service, texts, add_special_tokens=False)


async def logits_values(service: RouterService, body: GenerateBody) -> Mapping[str, Any]:
    """What the request and the model's defaults give the logits processors, by the names of the parameters.

    Raises:
        InvalidRequestError: A value names a token that the model does not have.
    """
    vocabulary = _Vocabulary(service)
    values: dict[str, Any] = dict(service.defaults.logits)
    for name, field in request_fields(body.params).items():
        given = getattr(body, name)
        if given is not None:
            values[name] = given if field.read is None else await field.read(given, vocabulary)
    return values
