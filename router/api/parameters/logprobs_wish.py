"""The log-probabilities that a body asks for."""

from __future__ import annotations

from dataclasses import dataclass

from router.api.bodies.chat_body import ChatBody
from router.api.bodies.completion_body import CompletionBody
from router.api.bodies.generate_body import GenerateBody
from router.errors import InvalidRequestError
from router.service import RouterService


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsWish:
    """How many of the most likely tokens to list for each token; None if log-probabilities are not wanted.

    ``num_output`` is for the answer's field ``logprobs``, which includes the prompt if it is ``echoed``;
    ``num_prompt`` for the field ``prompt_logprobs``.
    """

    num_output: int | None = None
    num_prompt: int | None = None
    echoed: bool = False

    @property
    def num_prompt_to_compute(self) -> int | None:
        """How many the engine has to compute for the prompt."""
        asked = [num for num in (self.num_prompt, self.num_output if self.echoed else None) if num is not None]
        return max(asked, default=None)


def chat_wish(service: RouterService, body: ChatBody) -> LogprobsWish:
    """A chat's wish.

    Raises:
        InvalidRequestError: ``top_logprobs`` without ``logprobs``, or too many.
    """
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError(
            "top_logprobs is only allowed when logprobs is true: set logprobs, or leave top_logprobs out",
            code="invalid_parameter",
            param="top_logprobs",
        )
    num_output = _checked(service, body.top_logprobs or 0, param="top_logprobs") if body.logprobs else None
    return LogprobsWish(num_output=num_output, num_prompt=_num_prompt(service, body))


def completion_wish(service: RouterService, body: CompletionBody) -> LogprobsWish:
    """A text completion's wish.

    Raises:
        InvalidRequestError: Too many are asked for.
    """
    num_output = None if body.logprobs is None else _checked(service, body.logprobs, param="logprobs")
    return LogprobsWish(num_output=num_output, num_prompt=_num_prompt(service, body), echoed=bool(body.echo))


def _num_prompt(service: RouterService, body: GenerateBody) -> int | None:
    if body.prompt_logprobs is None:
        return None
    if body.stream:
        raise InvalidRequestError(
            "prompt_logprobs is not available in streams: leave it out, or set stream to false",
            code="invalid_parameter",
            param="prompt_logprobs",
        )
    return _checked(service, body.prompt_logprobs, param="prompt_logprobs")


def _checked(service: RouterService, asked_for: int, *, param: str) -> int:
    """The number that was asked for; -1 means the whole vocabulary."""
    limit = service.settings.max_logprobs
    num = service.vocab_size() if asked_for == -1 else asked_for
    if num > limit:
        raise InvalidRequestError(
            f"the parameter '{param}' asks for {num} top tokens per position, the limit is {limit}",
            code="invalid_parameter",
            param=param,
        )
    return num
