"""The two endpoints that generate: from a validated body to a running answer."""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Sequence

from starlette.requests import Request

from router.api.answer_format import AnswerFormat, AnswerHead
from router.api.chat_body import ChatBody
from router.api.chat_format import ChatFormat
from router.api.completion_body import CompletionBody
from router.api.completion_format import CompletionFormat
from router.api.generate_body import GenerateBody
from router.api.prompts import chat_prompt, check_num_choices, check_vocabulary, completion_prompts
from router.api.request_body import read_body
from router.api.sampling import output_limit, sampling_params, stop_strings
from router.api.sse import GenerationResponse
from router.errors import InvalidRequestError, RouterError
from router.service import RouterService, TextRequest
from router.text_output import TextOutput

logger = logging.getLogger(f"baton.{__name__}")

TIMEOUT_HEADER = "X-Request-Timeout"
MAX_SESSION_CHARACTERS = 256
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for text completions; chats have none."""


async def answer_chat(service: RouterService, request: Request) -> GenerationResponse:
    """POST /v1/chat/completions.

    Raises:
        RouterError: The request is refused.
    """
    body = await read_body(request, ChatBody, settings=service.settings)
    _check(service, body)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequestError(
            f"max_tokens is {body.max_tokens} and max_completion_tokens is {body.max_completion_tokens}: give one",
            code="invalid_parameter",
            param="max_completion_tokens",
        )
    check_num_choices(service, body, num_prompts=1, param="messages")
    prompt = await chat_prompt(service, body)
    asked_for = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    head = _head(service, body, "chatcmpl")
    outputs = _start(
        service, body, [prompt], head, request, (asked_for, service.settings.default_max_tokens), param="messages"
    )
    return _response(service, outputs, ChatFormat(head), body)


async def answer_completion(service: RouterService, request: Request) -> GenerationResponse:
    """POST /v1/completions.

    Raises:
        RouterError: The request is refused.
    """
    body = await read_body(request, CompletionBody, settings=service.settings)
    _check(service, body)
    prompts = await completion_prompts(service, body)
    head = _head(service, body, "cmpl")
    outputs = _start(service, body, prompts, head, request, (body.max_tokens, COMPLETION_MAX_TOKENS), param="prompt")
    echoes = [service.tokenizer.decode(prompt) for prompt in prompts] if body.echo else []
    return _response(service, outputs, CompletionFormat(head, echoes=echoes), body)


def _response(
    service: RouterService, outputs: Sequence[TextOutput], answer: AnswerFormat, body: GenerateBody
) -> GenerationResponse:
    return GenerationResponse(
        outputs, answer, stream=bool(body.stream), write_timeout_s=service.settings.write_timeout_s
    )


def _check(service: RouterService, body: GenerateBody) -> None:
    service.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError(
            "stream_options is only allowed when stream is true", code="invalid_parameter", param="stream_options"
        )
    service.check_capacity()
    check_vocabulary(body.stop_token_ids or (), service.vocab_size(), param="stop_token_ids")


def _head(service: RouterService, body: GenerateBody, kind: str) -> AnswerHead:
    options = body.stream_options
    continuous = bool(options and options.continuous_usage_stats)
    return AnswerHead(
        answer_id=f"{kind}-{uuid.uuid4().hex}",
        created_s=int(time.time()),
        model=service.model_name,
        include_usage=bool(options and options.include_usage),
        continuous_usage=continuous,
        return_token_ids=bool(body.return_token_ids),
        num_choices_per_prompt=body.n or 1,
    )


def _start(
    service: RouterService,
    body: GenerateBody,
    prompts: Sequence[tuple[int, ...]],
    head: AnswerHead,
    request: Request,
    limit: tuple[int | None, int | None],
    *,
    param: str,
) -> list[TextOutput]:
    """Validate everything, then start every choice; if one cannot start, none runs."""
    texts = _text_requests(service, body, prompts, head, request, limit, param=param)
    logger.debug(
        "request accepted: request_id=%s answer_id=%s num_choices=%d",
        request.scope.get("baton_request_id"),
        head.answer_id,
        len(texts),
    )
    outputs: list[TextOutput] = []
    try:
        for text in texts:
            outputs.append(service.generate(text))  # noqa: PERF401 (those before a refusal must be cancelled)
    except RouterError:
        for output in outputs:
            output.cancel()
        raise
    return outputs


def _text_requests(
    service: RouterService,
    body: GenerateBody,
    prompts: Sequence[tuple[int, ...]],
    head: AnswerHead,
    request: Request,
    limit: tuple[int | None, int | None],
    *,
    param: str,
) -> list[TextRequest]:
    num_choices = head.num_choices_per_prompt
    timeout_s = timeout_header(service, request)
    session_id = session_header(service, request)
    stops = stop_strings(body, service.settings)
    asked_for, default = limit
    texts: list[TextRequest] = []
    for prompt in prompts:
        max_tokens = output_limit(
            asked_for,
            default=default,
            num_prompt_tokens=len(prompt),
            max_model_len=service.max_model_len(),
            param=param,
        )
        sampling = sampling_params(body, defaults=service.defaults, max_tokens=max_tokens)
        for choice in range(num_choices):
            texts.append(
                TextRequest(
                    request_id=f"{head.answer_id}-{len(texts)}",
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    # Choices of one prompt must differ, and each must be the same again with the same seed.
                    seed=None if body.seed is None else body.seed + choice,
                    stop=stops,
                    include_stop=bool(body.include_stop_str_in_output),
                    skip_special_tokens=body.skip_special_tokens is not False,
                    priority=body.priority or 0,
                    cache_salt=body.cache_salt,
                    timeout_s=timeout_s,
                    session_id=session_id,
                )
            )
    return texts


def timeout_header(service: RouterService, request: Request) -> float | None:
    """The caller's deadline in seconds, if it set one.

    Raises:
        InvalidRequestError: It is no positive number, or larger than allowed.
    """
    text = request.headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not 0.0 < timeout_s <= service.settings.max_timeout_s:
        raise InvalidRequestError(
            f"{TIMEOUT_HEADER} must be a number of seconds up to {service.settings.max_timeout_s:g}, got {text[:40]!r}",
            code="invalid_parameter",
            param=TIMEOUT_HEADER,
        )
    return timeout_s


def session_header(service: RouterService, request: Request) -> str | None:
    """The session that the caller named, if any.

    Raises:
        InvalidRequestError: The name is too long.
    """
    name = service.settings.session_header
    text = request.headers.get(name) if name is not None else None
    if text is not None and len(text) > MAX_SESSION_CHARACTERS:
        raise InvalidRequestError(
            f"{name} must have at most {MAX_SESSION_CHARACTERS} characters, got {len(text)}",
            code="invalid_parameter",
            param=name,
        )
    return text or None
