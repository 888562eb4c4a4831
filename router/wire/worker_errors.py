"""Translates workers' errors into the errors that callers see."""

from __future__ import annotations

from engine.contract.grammar import GRAMMAR_FAILED, GRAMMAR_REFUSED
from engine.contract.messages import TOO_MANY_BEAMS, FinishReason, TokenDelta
from router.errors import InvalidRequestError, QueueFullError, RouterError, WorkerFailedError
from router.pool.workers import WorkerRefusedError

KV_LOST = "kv_lost"
"""The code of a request that came back because more of its KV was lost than its decode replica should recompute."""

DRAINING = "draining"
"""The code of a refusal by a replica that is draining."""

ENGINE_DEAD = "engine_dead"
"""The code of a refusal by a replica whose engine has ended: it serves nothing any more."""

QUEUE_FULL = "queue_full"
"""The code of a refusal by a replica whose queue is full."""

_ELSEWHERE_CODES = frozenset({QUEUE_FULL, "duplicate_request", DRAINING, ENGINE_DEAD})
_CALLER_CODES = frozenset(
    {
        "prompt_too_long",
        "empty_prompt",
        "invalid_max_tokens",
        "unknown_token",
        GRAMMAR_REFUSED,
        GRAMMAR_FAILED,
        TOO_MANY_BEAMS,
    }
)


def is_retryable(error: WorkerRefusedError) -> bool:
    """True if the refusal is due to the replica's state at that moment, and not to the request."""
    return error.code in _ELSEWHERE_CODES


def is_lost(delta: TokenDelta) -> bool:
    """True if the engine gave the request up because the engine itself ended, so that another one can continue."""
    if delta.finish_reason is FinishReason.ABORT:
        return True
    return delta.error is not None and delta.error.code in _ELSEWHERE_CODES


def refusal_error(error: WorkerRefusedError) -> RouterError:
    """The error that the caller gets for a refusal."""
    if error.code == QUEUE_FULL:
        return QueueFullError(str(error), retry_after_s=1.0)
    if error.code in _CALLER_CODES:
        return InvalidRequestError(str(error), code=error.code)
    return WorkerFailedError(str(error), code=error.code)


def raise_for_error(delta: TokenDelta) -> None:
    """Do nothing unless the engine ended the request with an error.

    Raises:
        InvalidRequestError: The request asks for something that cannot be done; the code is the engine's.
        WorkerFailedError: The engine ended the request for another reason.
    """
    if delta.finish_reason is not FinishReason.ERROR:
        return
    if delta.error is None:
        raise WorkerFailedError("the engine ended the request with an error and did not say which")
    if delta.error.code in _CALLER_CODES:
        raise InvalidRequestError(delta.error.message, code=delta.error.code)
    raise WorkerFailedError(delta.error.message, code=delta.error.code)
