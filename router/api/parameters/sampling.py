"""Makes the engine's sampling parameters from a body's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from engine.contract.messages import BeamParams, SamplingParams
from engine.contract.request_fields import request_fields
from router.api.bodies.generate_body import GenerateBody
from router.api.prompts import check_vocabulary, encode_all
from router.errors import InvalidRequestError
from router.service import RouterService
from router.settings import RouterSettings
from router.text.generation_config import GenerationDefaults

MAX_STOP_CHARACTERS = 1000
"""Maximum length of a stop string, because each choice holds back as much text, and rereads it with each piece."""


def sampling_params(
    body: GenerateBody,
    *,
    defaults: GenerationDefaults,
    max_tokens: int,
    logits: Mapping[str, Any] | None = None,
    num_logprobs: int | None = None,
    num_prompt_logprobs: int | None = None,
    grammar: str | None = None,
    beams: BeamParams | None = None,
) -> SamplingParams:
    """The engine's parameters; the seed is drawn elsewhere."""
    top_k = defaults.top_k if body.top_k is None else body.top_k
    return body.params(
        max_tokens=max_tokens,
        temperature=0.0 if beams is not None else _given(body.temperature, defaults.temperature),
        top_p=_given(body.top_p, defaults.top_p),
        top_k=max(top_k, 0),
        min_p=_given(body.min_p, defaults.min_p),
        min_tokens=body.min_tokens or 0,
        eos_token_ids=defaults.eos_token_ids,
        stop_token_ids=tuple(dict.fromkeys(body.stop_token_ids or ())),
        ignore_eos=bool(body.ignore_eos),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        grammar=grammar,
        beams=beams,
        **(logits or {}),
    )


def stop_strings(body: GenerateBody, settings: RouterSettings) -> tuple[str, ...]:
    """The stop strings, as a tuple.

    Raises:
        InvalidRequestError: One is empty or too long, or there are too many.
    """
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stops) > settings.max_num_stop_strings:
        raise InvalidRequestError(
            f"stop has {len(stops)} strings, the limit is {settings.max_num_stop_strings}",
            code="invalid_parameter",
            param="stop",
        )
    if not all(stops):
        raise InvalidRequestError("a stop string must not be empty", code="invalid_parameter", param="stop")
    if len(longest := max(stops, key=len, default="")) > MAX_STOP_CHARACTERS:
        raise InvalidRequestError(
            f"stop has a string of {len(longest)} characters, the limit is {MAX_STOP_CHARACTERS}: it begins with "
            f"{longest[:40]!r}",
            code="invalid_parameter",
            param="stop",
        )
    return tuple(dict.fromkeys(stops))


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


class _Vocabulary:
    """Implements ``Vocabulary`` by a router's tokenizer."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    def check(self, token_ids: Sequence[int], *, param: str) -> None:
        """See ``Vocabulary``; raises InvalidRequestError."""
        check_vocabulary(token_ids, self._service.vocab_size(), param=param)

    def has(self, token_ids: Sequence[int]) -> bool:
        """See ``Vocabulary``."""
        return max(token_ids) < self._service.vocab_size()

    async def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """See ``Vocabulary``."""
        return await encode_all(self._service, texts, add_special_tokens=False)

    def refuse(self, reason: str, *, param: str) -> NoReturn:
        """See ``Vocabulary``; raises InvalidRequestError."""
        raise InvalidRequestError(
            f"the parameter '{param}' is invalid: {reason}", code="invalid_parameter", param=param
        )


async def logits_values(service: RouterService, body: GenerateBody) -> Mapping[str, Any]:
    """The values for logits processors, from the request and the model's defaults, by parameter name.

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
