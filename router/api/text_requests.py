"""Starts the choices of a validated body."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from engine.contract.messages import BeamParams, SamplingParams
from engine.contract.promise import NO_PROMISE, Promise
from engine.contract.token_ids import TokenIds
from router.api.answers.answer_format import AnswerHead
from router.api.bodies.generate_body import GenerateBody
from router.api.http.guard import owner_of
from router.api.http.headers import promise_headers, session_header, timeout_header
from router.api.output_limit import OutputLimit
from router.api.parameters.logprobs_wish import LogprobsWish
from router.api.parameters.sampling import sampling_params, stop_strings
from router.api.request_id import SCOPE_KEY
from router.api.traces import origin_of
from router.errors import InvalidRequestError
from router.request.text_output import TextOutput
from router.request.text_request import TextRequest
from router.service import RouterService
from router.tools.turn_reader import TurnRules

MAX_PROMPT_LOGPROBS = 400_000
"""Maximum number of log-probabilities of prompt tokens in one answer: some 30 MB of JSON."""

MAX_OUTPUT_LOGPROBS = 1_000_000
"""Maximum number of log-probabilities of output tokens in an answer sent at once: some 100 MB of JSON."""


DRAWN_SEED = -1
"""The seed with which clients of vLLM ask for a random one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One body's prompts, with everything derived from its parameters.

    ``param`` is the parameter to blame for a prompt that is too long. ``logits`` is what logits processors get.
    Answers must match ``grammar``, which came from ``grammar_param``; ``turn`` is how they are parsed. ``beams`` is the
    search that finds all choices of a prompt; None if each is generated separately. ``prediction`` is the expected
    output. ``tells_at_once``: the answer, or the last event of its stream, has all data about the output.
    """

    prompts: Sequence[TokenIds]
    limit: OutputLimit
    param: str
    logits: Mapping[str, Any]
    wish: LogprobsWish
    grammar: str | None = None
    grammar_param: str | None = None
    turn: TurnRules | None = None
    beams: BeamParams | None = None
    prediction: TokenIds | None = None
    tells_at_once: bool = False


def start_choices(
    service: RouterService, body: GenerateBody, ask: Ask, head: AnswerHead, request: Request
) -> list[TextOutput]:
    """Validate everything, then start every choice; if one cannot start, none runs.

    Raises:
        RouterError: The request is refused.
    """
    _check_size(ask, num_choices=head.num_choices_per_prompt)
    most = _most_output_tokens(ask, num_outputs=len(ask.prompts) * head.num_candidates_per_prompt)
    ask = replace(ask, limit=replace(ask.limit, most=most))
    num_each = 1 if ask.beams is not None else head.num_candidates_per_prompt
    # A caller may reuse its id, but the id that workers use must be unique.
    unique_id = head.answer_id if body.request_id is None else f"{head.answer_id}-{uuid.uuid4().hex}"
    prompts: list[list[TextRequest]] = []
    for index, prompt in enumerate(ask.prompts):
        text = _text_request(service, body, ask, prompt, request)
        choices: list[TextRequest] = []
        for choice in range(num_each):
            # Choices of one prompt must differ, and each must be reproducible with the same seed.
            seed = None if body.seed is None or body.seed == DRAWN_SEED else body.seed + choice
            name = f"{unique_id}-{index * num_each + choice}"
            choices.append(replace(text, request_id=name, seed=seed))
        prompts.append(choices)
    origin = origin_of(request, service, answer_id=head.answer_id, num_choices=len(prompts) * num_each)
    prompts[0][0] = replace(prompts[0][0], origin=origin)
    return service.generate_choices(prompts)


def _check_size(ask: Ask, *, num_choices: int) -> None:
    """Bound the data about prompts, which every choice repeats, so that it does not fill the memory."""
    if ask.wish.num_prompt_to_compute is None:
        return
    num_tokens = sum(map(len, ask.prompts))
    num = num_tokens * (1 + ask.wish.num_prompt_to_compute) * num_choices
    if num > MAX_PROMPT_LOGPROBS:
        param = "logprobs" if ask.wish.num_prompt is None else "prompt_logprobs"
        raise InvalidRequestError(
            f"{num_tokens} prompt tokens with {param} for {num_choices} choices make {num} log-probabilities, "
            f"the limit is {MAX_PROMPT_LOGPROBS}; ask for fewer top tokens, choices or prompts",
            code="invalid_parameter",
            param=param,
        )


def _most_output_tokens(ask: Ask, *, num_outputs: int) -> int | None:
    """How many tokens each output may have if all its data is sent at once; None for any number.

    Raises:
        InvalidRequestError: The body asks for more, or not even one token fits.
    """
    num_beside = ask.wish.num_output
    if num_beside is None or not ask.tells_at_once:
        return None
    most = MAX_OUTPUT_LOGPROBS // (num_outputs * (1 + num_beside))
    num_tokens = max(ask.limit.asked_for or 1, 1)
    if num_tokens > most:
        choices = "1 choice" if num_outputs == 1 else f"{num_outputs} choices"
        raise InvalidRequestError(
            f"{choices} of up to {num_tokens} tokens with {num_beside} top tokens each make "
            f"{num_outputs * num_tokens * (1 + num_beside)} log-probabilities, the limit is {MAX_OUTPUT_LOGPROBS} in "
            f"an unstreamed answer: set {ask.limit.param} to {most} or less, ask for fewer choices or top tokens, or "
            "stream the answer",
            code="invalid_parameter",
            param=ask.limit.param,
        )
    return most


def _text_request(
    service: RouterService, body: GenerateBody, ask: Ask, prompt: TokenIds, request: Request
) -> TextRequest:
    return TextRequest(
        request_id="",
        prompt_token_ids=prompt,
        sampling=_sampling(service, body, ask, num_prompt_tokens=len(prompt)),
        stop=stop_strings(body, service.settings),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        priority=body.priority or 0,
        promise=_promise(service, body, request),
        cache_salt=body.cache_salt,
        timeout_s=timeout_header(service, request),
        session_id=session_header(service, request),
        caller_id=request.scope.get(SCOPE_KEY, ""),
        owner=owner_of(request.scope),
        shows_logprobs=ask.wish.num_output is not None,
        is_prompt_only=ask.limit.is_prompt_only,
        turn=ask.turn,
        prediction_token_ids=ask.prediction,
    )


def _promise(service: RouterService, body: GenerateBody, request: Request) -> Promise:
    """The promise that the body asks for, or else the headers, or else the default."""
    slo = body.slo
    wanted = NO_PROMISE if slo is None else Promise(ttft_ms=slo.ttft_ms, itl_ms=slo.itl_ms)
    return wanted.over(promise_headers(request)).over(service.settings.promise)


def _sampling(service: RouterService, body: GenerateBody, ask: Ask, *, num_prompt_tokens: int) -> SamplingParams:
    max_tokens = ask.limit.num_tokens(
        num_prompt_tokens=num_prompt_tokens, max_model_len=service.max_model_len(), prompt_param=ask.param
    )
    ask.limit.check_min_tokens(body.min_tokens or 0, max_tokens=max_tokens)
    num_logprobs = ask.wish.num_output
    if num_logprobs is None and num_candidates(body, ask.beams) > (body.n or 1):
        num_logprobs = 0
    return sampling_params(
        body,
        defaults=service.defaults,
        max_tokens=max_tokens,
        logits=ask.logits,
        grammar=ask.grammar,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=ask.wish.num_prompt_to_compute,
        beams=ask.beams,
    )


def num_candidates(body: GenerateBody, beams: BeamParams | None) -> int:
    """How many outputs are generated for each prompt; the best of them are returned.

    Raises:
        InvalidRequestError: ``best_of`` is less than ``n``, or is combined with streaming.
    """
    num_choices = body.n or 1
    if beams is not None or body.best_of is None or body.best_of == num_choices:
        return num_choices
    if body.best_of < num_choices:
        reason = f"best_of is {body.best_of}, but n is {num_choices}: set best_of to n or more, or leave it out"
    elif body.stream:
        reason = f"best_of is {body.best_of} and n is {num_choices}, but streams cannot select the best: omit best_of"
    else:
        return body.best_of
    raise InvalidRequestError(reason, code="invalid_parameter", param="best_of")
