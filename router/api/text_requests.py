"""From a validated body to running choices."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from engine.contract.messages import SamplingParams
from engine.contract.promise import NO_PROMISE, Promise
from engine.contract.token_ids import TokenIds
from router.api.answers.answer_format import AnswerHead
from router.api.bodies.generate_body import GenerateBody
from router.api.http.headers import promise_headers, session_header, timeout_header
from router.api.output_limit import OutputLimit
from router.api.parameters.logprobs_wish import LogprobsWish
from router.api.parameters.sampling import sampling_params, stop_strings
from router.api.request_id import SCOPE_KEY
from router.errors import InvalidRequestError
from router.request.text_output import TextOutput
from router.service import RouterService, TextRequest
from router.tools.turn_reader import TurnRules

MAX_PROMPT_LOGPROBS = 400_000
"""Log-probabilities of prompt tokens in one answer: some 30 MB of JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One body's prompts with all that was made of its parameters.

    ``param`` is the parameter to blame for a prompt that is too long. ``logits`` is what logits processors get,
    ``grammar`` what answers must match, ``turn`` how they are read, and
    ``prediction`` what they are expected to say.
    """

    prompts: Sequence[TokenIds]
    limit: OutputLimit
    param: str
    logits: Mapping[str, Any]
    wish: LogprobsWish
    grammar: str | None = None
    turn: TurnRules | None = None
    prediction: TokenIds | None = None


def start_choices(
    service: RouterService, body: GenerateBody, ask: Ask, head: AnswerHead, request: Request
) -> list[TextOutput]:
    """Validate everything, then start every choice; if one cannot start, none runs.

    Raises:
        RouterError: The request is refused.
    """
    _check_size(ask, num_choices=head.num_choices_per_prompt)
    num_each = head.num_candidates_per_prompt
    # A caller may use its id again: what the workers know a request by must be unique.
    unique_id = head.answer_id if body.request_id is None else f"{head.answer_id}-{uuid.uuid4().hex}"
    prompts: list[list[TextRequest]] = []
    for index, prompt in enumerate(ask.prompts):
        text = _text_request(service, body, ask, prompt, request)
        choices: list[TextRequest] = []
        for choice in range(num_each):
            # Choices of one prompt must differ, and each must be the same again with the same seed.
            seed = None if body.seed is None else body.seed + choice
            name = f"{unique_id}-{index * num_each + choice}"
            choices.append(replace(text, request_id=name, seed=seed))
        prompts.append(choices)
    return service.generate_choices(prompts)


def _check_size(ask: Ask, *, num_choices: int) -> None:
    """Every choice repeats what is told of its prompt: that must not fill the memory."""
    if ask.wish.num_prompt_to_compute is None:
        return
    num_tokens = sum(map(len, ask.prompts))
    num = num_tokens * (1 + ask.wish.num_prompt_to_compute) * num_choices
    if num > MAX_PROMPT_LOGPROBS:
        param = "logprobs" if ask.wish.num_prompt is None else "prompt_logprobs"
        raise InvalidRequestError(
            f"{num_tokens} prompt tokens with {param} for {num_choices} choices make {num} log-probabilities, "
            f"the limit is {MAX_PROMPT_LOGPROBS}; ask for fewer tokens beside each, or for fewer choices or prompts",
            code="invalid_parameter",
            param=param,
        )


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
        shows_logprobs=ask.wish.num_output is not None,
        is_prompt_only=ask.limit.is_prompt_only,
        turn=ask.turn,
        prediction_token_ids=ask.prediction,
    )


def _promise(service: RouterService, body: GenerateBody, request: Request) -> Promise:
    """What the body wants, else the headers, else what holds for everybody."""
    slo = body.slo
    wanted = NO_PROMISE if slo is None else Promise(ttft_ms=slo.ttft_ms, itl_ms=slo.itl_ms)
    return wanted.over(promise_headers(request)).over(service.settings.promise)


def _sampling(service: RouterService, body: GenerateBody, ask: Ask, *, num_prompt_tokens: int) -> SamplingParams:
    max_tokens = ask.limit.num_tokens(
        num_prompt_tokens=num_prompt_tokens, max_model_len=service.max_model_len(), prompt_param=ask.param
    )
    ask.limit.check_min_tokens(body.min_tokens or 0, max_tokens=max_tokens)
    num_logprobs = ask.wish.num_output
    if num_logprobs is None and num_candidates(body) > (body.n or 1):
        num_logprobs = 0
    return sampling_params(
        body,
        defaults=service.defaults,
        max_tokens=max_tokens,
        logits=ask.logits,
        grammar=ask.grammar,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=ask.wish.num_prompt_to_compute,
    )


def num_candidates(body: GenerateBody) -> int:
    """How many outputs are generated for each prompt.

    Raises:
        InvalidRequestError: ``best_of`` is less than ``n``, or is to be streamed.
    """
    num_choices = body.n or 1
    if body.best_of is None or body.best_of == num_choices:
        return num_choices
    if body.best_of < num_choices:
        reason = f"best_of is {body.best_of}, less than n, which is {num_choices}"
    elif body.stream:
        reason = f"best_of is {body.best_of} and n is {num_choices}: which are the best cannot be known in a stream"
    else:
        return body.best_of
    raise InvalidRequestError(reason, code="invalid_parameter", param="best_of")
