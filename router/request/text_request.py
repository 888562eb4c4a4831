"""One sequence as the API asks for it, before it is a request to workers."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.messages import SamplingParams
from engine.contract.promise import NO_PROMISE, Promise
from engine.contract.token_ids import TokenIds
from router.tools.turn_reader import TurnRules
from router.trace.origin import Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """One sequence to generate, as the API hands it in. ``seed`` None lets the service draw one.

    ``caller_id`` is the caller's id of it, for logs. ``is_prompt_only`` asks for the prompt's log-probabilities only.
    ``turn`` says how to tell thinking, content and calls apart; None if all text is content. ``prediction_token_ids``
    are the output that the caller expects. ``origin`` is what its trace is kept under; None: it is not traced.
    ``owner`` is the hash of the caller's API key; empty where none was needed.
    """

    request_id: str
    prompt_token_ids: TokenIds
    sampling: SamplingParams
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    promise: Promise = NO_PROMISE
    cache_salt: str | None = None
    timeout_s: float | None = None
    session_id: str | None = None
    caller_id: str = ""
    shows_logprobs: bool = False
    is_prompt_only: bool = False
    turn: TurnRules | None = None
    prediction_token_ids: TokenIds | None = None
    origin: Origin | None = None
    owner: str = ""
