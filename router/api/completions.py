"""The two endpoints that generate: from a validated body to a running answer."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace

from starlette.requests import Request

from router.api.answers.answer_format import AnswerFormat, AnswerHead
from router.api.answers.chat_format import ChatFormat
from router.api.answers.completion_format import CompletionFormat
from router.api.answers.logprobs_answer import LogprobsAnswer
from router.api.answers.sse import GenerationResponse
from router.api.bodies.chat_body import ChatBody
from router.api.bodies.completion_body import CompletionBody
from router.api.bodies.generate_body import GenerateBody
from router.api.bodies.processor_fields import with_fields_of
from router.api.http.request_body import read_body
from router.api.ignored import ignored_header
from router.api.output_limit import OutputLimit
from router.api.parameters.answer_grammar import answer_grammar, asker_of, grammar_names
from router.api.parameters.beams import beam_params
from router.api.parameters.logprobs_wish import chat_wish, completion_wish
from router.api.parameters.sampling import logits_values
from router.api.prompts import (
    chat_prompt,
    check_num_choices,
    check_vocabulary,
    completion_prompts,
    echoed_message,
    predicted_answer,
)
from router.api.request_id import SCOPE_KEY
from router.api.text_requests import Ask, num_candidates, start_choices
from router.api.turns import chosen_tools, grammar_param, turn_grammar, turn_rules
from router.errors import InvalidRequestError
from router.request.text_output import TextOutput
from router.service import RouterService

logger = logging.getLogger(f"baton.{__name__}")

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for text completions; chats have none."""


async def answer_chat(service: RouterService, request: Request) -> GenerationResponse:
    """POST /v1/chat/completions.

    Raises:
        RouterError: The request is refused.
    """
    model = with_fields_of(service.params, ChatBody)
    async with read_body(request, model, settings=service.settings, room=service.body_room) as body:
        return await _answer_chat(service, request, body)


async def _answer_chat(service: RouterService, request: Request, body: ChatBody) -> GenerationResponse:
    head, outputs = await start_chat(service, request, body)
    answer = ChatFormat(head, echo=echoed_message(body), shows_reasoning=body.include_reasoning is not False)
    return _response(service, outputs, answer, body)


async def start_chat(
    service: RouterService, request: Request, body: ChatBody, *, answer_id: str | None = None
) -> tuple[AnswerHead, list[TextOutput]]:
    """Validate a conversation and start its answers, under the given id or a new one.

    A caller that gives an id writes the answer in its own format, whose streams may also report everything at the end.

    Raises:
        RouterError: The request is refused.
    """
    _check(service, body)
    beams = beam_params(body, vocab_size=service.vocab_size())
    limit = _chat_limit(service, body)
    check_num_choices(service, body, num_prompts=1, param="messages")
    calls = chosen_tools(service, body)
    prompt = await chat_prompt(service, body, limit)
    turn, asker = turn_rules(service, calls, prompt.text or ""), asker_of(request)
    ask = Ask(
        prompts=[prompt.token_ids],
        limit=limit,
        param="messages",
        logits=await logits_values(service, body),
        wish=chat_wish(service, body),
        grammar=await turn_grammar(service, body, turn, asker, answer=await answer_grammar(service, body, asker)),
        grammar_param=grammar_param(body, turn),
        turn=turn,
        beams=beams,
        prediction=await predicted_answer(service, body),
        tells_at_once=not body.stream or answer_id is not None,
    )
    head = _head(service, body, "chatcmpl", ask)
    if answer_id is not None:
        head = replace(head, answer_id=answer_id)
    return head, _start(service, body, ask, head, request)


async def answer_completion(service: RouterService, request: Request) -> GenerationResponse:
    """POST /v1/completions.

    Raises:
        RouterError: The request is refused.
    """
    model = with_fields_of(service.params, CompletionBody)
    async with read_body(request, model, settings=service.settings, room=service.body_room) as body:
        return await _answer_completion(service, request, body)


async def _answer_completion(service: RouterService, request: Request, body: CompletionBody) -> GenerationResponse:
    _check(service, body)
    beams = beam_params(body, vocab_size=service.vocab_size())
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequestError(
            "max_tokens is 0, which is only allowed with echo: set max_tokens to 1 or more, or set echo",
            code="invalid_parameter",
            param="max_tokens",
        )
    limit = OutputLimit(asked_for=body.max_tokens, default=COMPLETION_MAX_TOKENS)
    prompts = await completion_prompts(service, body, limit)
    ask = Ask(
        prompts=[prompt.token_ids for prompt in prompts],
        limit=limit,
        param="prompt",
        logits=await logits_values(service, body),
        grammar=await answer_grammar(service, body, asker_of(request)),
        grammar_param=next(iter(grammar_names(body)), None),
        wish=completion_wish(service, body),
        beams=beams,
        tells_at_once=not body.stream,
    )
    head = _head(service, body, "cmpl", ask)
    outputs = _start(service, body, ask, head, request)
    echoes = [prompt.echo(service.tokenizer) for prompt in prompts] if body.echo else []
    return _response(service, outputs, CompletionFormat(head, echoes=echoes), body)


def _chat_limit(service: RouterService, body: ChatBody) -> OutputLimit:
    """A chat's limit, from OpenAI's newer parameter or from the older one."""
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequestError(
            f"max_tokens is {body.max_tokens} and max_completion_tokens is {body.max_completion_tokens}: send only one "
            "of them",
            code="invalid_parameter",
            param="max_completion_tokens",
        )
    default = service.settings.default_max_tokens
    if body.max_completion_tokens is None:
        return OutputLimit(asked_for=body.max_tokens, default=default)
    return OutputLimit(asked_for=body.max_completion_tokens, default=default, param="max_completion_tokens")


def _response(
    service: RouterService, outputs: Sequence[TextOutput], answer: AnswerFormat, body: GenerateBody
) -> GenerationResponse:
    return GenerationResponse(
        outputs,
        answer,
        stream=bool(body.stream),
        write_timeout_s=service.settings.write_timeout_s,
        headers=ignored_header(body, service.chat_renderer.templates),
    )


def _check(service: RouterService, body: GenerateBody) -> None:
    service.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError(
            "stream_options is only allowed when stream is true: set stream, or leave stream_options out",
            code="invalid_parameter",
            param="stream_options",
        )
    service.check_capacity()
    if body.stop_token_ids:
        check_vocabulary(body.stop_token_ids, service.vocab_size(), param="stop_token_ids")


def _head(service: RouterService, body: GenerateBody, kind: str, ask: Ask) -> AnswerHead:
    options, wish = body.stream_options, ask.wish
    logprobs = None
    if wish.num_output is not None or wish.num_prompt is not None:
        logprobs = LogprobsAnswer(
            speller=service.speller,
            num_top=wish.num_output or 0,
            detokenizer=lambda: service.detokenizer((), skip_special_tokens=False),
            as_token_ids=bool(body.return_tokens_as_token_ids),
        )
    return AnswerHead(
        answer_id=f"{kind}-{body.request_id or uuid.uuid4().hex}",
        created_s=int(time.time()),
        model=service.model_name,
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.sends_running_usage),
        return_token_ids=bool(body.return_token_ids),
        num_choices_per_prompt=body.n or 1,
        num_candidates_per_prompt=num_candidates(body, ask.beams),
        logprobs=logprobs,
        shows_logprobs=wish.num_output is not None,
        num_prompt_logprobs=wish.num_prompt,
        tells_of_prompts=wish.num_prompt_to_compute is not None,
        grammar_param=ask.grammar_param,
    )


def _start(
    service: RouterService, body: GenerateBody, ask: Ask, head: AnswerHead, request: Request
) -> list[TextOutput]:
    if body.request_id is not None:
        request.scope[SCOPE_KEY] = body.request_id
    outputs = start_choices(service, body, ask, head, request)
    logger.debug("request accepted: request_id=%s num_choices=%d", outputs[0].generation.name_in_logs, len(outputs))
    return outputs
