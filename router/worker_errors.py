"""What workers say when something is wrong, turned into what callers see."""

from __future__ import annotations

from engine.messages import TokenDelta
from router.errors import InvalidRequestError, QueueFullError, RouterError, WorkerFailedError
from router.workers import WorkerRefusedError

_ELSEWHERE_CODES = frozenset({"queue_full", "duplicate_request", "draining", "engine_dead"})
_CALLER_CODES = frozenset({"prompt_too_long", "invalid_request"})


def is_retryable(error: WorkerRefusedError) -> bool:
    """True when the refusal is about that replica at that moment, and not about the request."""
    return error.code in _ELSEWHERE_CODES


def refusal_error(error: WorkerRefusedError) -> RouterError:
    """The caller's error for a refusal."""
    if error.code == "queue_full":
        return QueueFullError(what="requests waiting on the workers", limit=0, retry_after_s=1.0)
    if error.code in _CALLER_CODES:
        return InvalidRequestError(str(error), code=error.code)
    return WorkerFailedError(str(error), code=error.code)


def delta_error(delta: TokenDelta) -> RouterError:
    """The caller's error for a request that an engine ended with one."""
    if delta.error is None:
        return WorkerFailedError("the engine ended the request with an error and did not say which")
    return WorkerFailedError(delta.error.message, code=delta.error.code)
