"""A body's beam search parameters, and the parameters that cannot be combined with it."""

from __future__ import annotations

from collections.abc import Iterator

from engine.contract.messages import BeamParams
from router.api.bodies.chat_body import ChatBody
from router.api.bodies.completion_body import CompletionBody
from router.api.bodies.generate_body import GenerateBody
from router.errors import InvalidRequestError

_GRAMMAR_FIELDS = (
    *("structured_outputs", "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("tools", "thinking_token_budget"),
)


def beam_params(body: GenerateBody, *, vocab_size: int) -> BeamParams | None:
    """The beam search that a body asks for; None if it asks for none.

    The width is ``beam_width``, or as in vLLM ``best_of``, or ``n``; the ``n`` best outputs are returned.

    Raises:
        InvalidRequestError: The parameters contradict each other, or another one cannot be combined with a search.
    """
    num_results = body.n or 1
    if not body.use_beam_search and (body.beam_width is None or body.use_beam_search is False):
        _check_no_search(body)
        return None
    width = body.beam_width or body.best_of or num_results
    if body.best_of is not None and body.best_of != width:
        raise _refusal(f"best_of is {body.best_of} and beam_width is {width}: send only one of them", "best_of")
    name = next((name for name in ("beam_width", "best_of") if getattr(body, name)), "n")
    if width < 2:
        raise _refusal(f"a beam search needs at least 2 beams, but {name} is {width}: {_width_remedy(name)}", name)
    if 2 * width > vocab_size:
        raise _refusal(
            f"{name} is {width}: the beams need 2 candidate tokens each, {2 * width} in all, but the model has only "
            f"{vocab_size} tokens; set it to {vocab_size // 2} or less",
            name,
        )
    if num_results > width:
        raise _refusal(f"n is {num_results}, but {name} is {width}: lower n to that or less, or raise {name}", name)
    for param, reason in _obstacles(body, width):
        raise _refusal(f"{param} cannot be combined with a beam search: {reason}", param)
    return BeamParams(
        width=width,
        num_results=num_results,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=False if body.early_stopping is None else body.early_stopping,
    )


def _width_remedy(name: str) -> str:
    if name == "beam_width":
        return "set it to 2 or more, or leave it out to generate without a beam search"
    return "set beam_width to 2 or more, or leave out use_beam_search"


def _check_no_search(body: GenerateBody) -> None:
    has_value = {
        "beam_width": body.beam_width is not None,
        "length_penalty": body.length_penalty not in (None, 1.0),
        "early_stopping": body.early_stopping not in (None, False),
    }
    for param, is_given in has_value.items():
        if is_given:
            raise _refusal(
                f"{param} only has an effect with a beam search: set use_beam_search, or leave it out", param
            )


def _obstacles(body: GenerateBody, width: int) -> Iterator[tuple[str, str]]:
    """Parameters of a body that a search cannot follow, each with the reason."""
    if body.stream:
        yield "stream", "all its outputs are only known at its end; leave it out"
    if body.temperature:
        yield "temperature", "tokens are not sampled; set it to 0 or leave it out"
    if body.stop:
        yield "stop", "outputs cannot end by a text; use stop_token_ids"
    if isinstance(body, CompletionBody | ChatBody) and body.logprobs is not None and body.logprobs is not False:
        yield "logprobs", "only the sum for each output is available, as cumulative_logprob; leave it out"
    if body.prompt_logprobs is not None:
        yield "prompt_logprobs", "log-probabilities of the prompt are not available; leave it out"
    if body.allowed_token_ids is not None and len(set(body.allowed_token_ids)) < 2 * width:  # type: ignore[attr-defined]
        yield (
            "allowed_token_ids",
            f"{width} beams need at least {2 * width} allowed tokens; allow more, or use fewer beams",
        )
    for param in _GRAMMAR_FIELDS:
        value = getattr(body, param, None)
        if value is not None and value != [] and not (param == "response_format" and value.type == "text"):
            yield param, "outputs cannot follow a grammar; leave it out"


def _refusal(reason: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(reason, code="invalid_parameter", param=param)
