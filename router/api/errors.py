"""Errors as HTTP answers, in the format of OpenAI or Anthropic."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from engine.contract.grammar import GRAMMAR_FAILED, GRAMMAR_REFUSED
from router.api.bodies.strict_body import UnsupportedValueError
from router.errors import (
    AdminClosedError,
    AdminKeyError,
    BodiesFullError,
    BodyEncodedError,
    BodyNotJsonError,
    BodyTimeoutError,
    BodyTooLargeError,
    DeadlineExceededError,
    HeadersTimeoutError,
    HeadersTooLargeError,
    HostNotAllowedError,
    InvalidApiKeyError,
    InvalidRequestError,
    NoReplicaError,
    OriginNotAllowedError,
    QueueFullError,
    RequestCancelledError,
    ResponseNotFoundError,
    ResponseUnreachableError,
    RouterError,
    TooManyConnectionsError,
    TooManyPipelinedError,
    TooManyValuesError,
    TooManyWatchersError,
    TraceNotFoundError,
    UnknownModelError,
    UnknownReplicaError,
    WorkerFailedError,
)

_STATUS: tuple[tuple[type[RouterError], int, str], ...] = (
    (InvalidRequestError, HTTPStatus.BAD_REQUEST, "invalid_request_error"),
    (InvalidApiKeyError, HTTPStatus.UNAUTHORIZED, "invalid_request_error"),
    (AdminKeyError, HTTPStatus.FORBIDDEN, "permission_error"),
    (AdminClosedError, HTTPStatus.FORBIDDEN, "permission_error"),
    (HostNotAllowedError, HTTPStatus.FORBIDDEN, "permission_error"),
    (OriginNotAllowedError, HTTPStatus.FORBIDDEN, "permission_error"),
    (ResponseNotFoundError, HTTPStatus.NOT_FOUND, "invalid_request_error"),
    (TraceNotFoundError, HTTPStatus.NOT_FOUND, "invalid_request_error"),
    (ResponseUnreachableError, HTTPStatus.SERVICE_UNAVAILABLE, "service_unavailable_error"),
    (UnknownReplicaError, HTTPStatus.NOT_FOUND, "invalid_request_error"),
    (UnknownModelError, HTTPStatus.NOT_FOUND, "invalid_request_error"),
    (BodyTooLargeError, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "invalid_request_error"),
    (TooManyValuesError, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "invalid_request_error"),
    (BodyEncodedError, HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "invalid_request_error"),
    (BodyNotJsonError, HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "invalid_request_error"),
    (BodyTimeoutError, HTTPStatus.REQUEST_TIMEOUT, "invalid_request_error"),
    (HeadersTooLargeError, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "invalid_request_error"),
    (HeadersTimeoutError, HTTPStatus.REQUEST_TIMEOUT, "invalid_request_error"),
    (QueueFullError, HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_error"),
    (TooManyWatchersError, HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_error"),
    (BodiesFullError, HTTPStatus.SERVICE_UNAVAILABLE, "service_unavailable_error"),
    (TooManyPipelinedError, HTTPStatus.BAD_REQUEST, "invalid_request_error"),
    (TooManyConnectionsError, HTTPStatus.SERVICE_UNAVAILABLE, "service_unavailable_error"),
    (NoReplicaError, HTTPStatus.SERVICE_UNAVAILABLE, "service_unavailable_error"),
    (RequestCancelledError, HTTPStatus.SERVICE_UNAVAILABLE, "service_unavailable_error"),
    (DeadlineExceededError, HTTPStatus.GATEWAY_TIMEOUT, "timeout_error"),
    (WorkerFailedError, HTTPStatus.BAD_GATEWAY, "server_error"),
)


MESSAGES_PATH = "/v1/messages"

_ANTHROPIC_TYPES: Mapping[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
"""Anthropic's error types by HTTP status."""

_DETAILS: Mapping[str | None, Mapping[str, object]] = {
    "thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
}
"""The error detail that makes the tool runner of Anthropic's client continue without a thread."""


def status_of(error: RouterError) -> tuple[int, str]:
    """The HTTP status and OpenAI's error type for an error."""
    for kind, status, name in _STATUS:
        if isinstance(error, kind):
            return int(status), name
    return int(HTTPStatus.INTERNAL_SERVER_ERROR), "server_error"


def error_body(message: str, *, kind: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    """The object that OpenAI's clients read."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_event(error: RouterError) -> bytes:
    """The event for an error in the middle of a stream."""
    _, kind = status_of(error)
    body = error_body(error.message, kind=kind, code=error.code, param=error.param)
    return b"data: " + json.dumps(body).encode() + b"\n\n"


class ErrorResponse(Response):
    """An error as a whole answer, in the format for the path's clients."""

    def __init__(self, body: Mapping[str, Any], *, status: int, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status_code=status)
        self._answers = (
            JSONResponse(body, status_code=status, headers=headers),
            JSONResponse(
                anthropic_error_body(
                    str(body["error"]["message"]), status=status, details=_DETAILS.get(body["error"]["param"])
                ),
                status_code=status,
                headers=headers,
            ),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self.for_path(scope["path"])(scope, receive, send)

    def for_path(self, path: str) -> JSONResponse:
        """The answer in the format for one path's clients."""
        return self._answers[is_of_messages(path)]


def is_of_messages(path: str) -> bool:
    """True if a path belongs to the Messages API."""
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


def anthropic_error_body(
    message: str, *, status: int, details: Mapping[str, object] | None = None
) -> dict[str, object]:
    """The object that Anthropic's clients read."""
    default = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
    error: dict[str, object] = {"type": _ANTHROPIC_TYPES.get(status, default), "message": message}
    if details is not None:
        error["details"] = details
    return {"type": "error", "error": error}


def error_response(error: RouterError) -> ErrorResponse:
    """An error as a whole answer."""
    status, kind = status_of(error)
    headers = {} if error.retry_after_s is None else {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    if isinstance(error, InvalidApiKeyError):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, BodyEncodedError):
        headers["Accept-Encoding"] = "identity"
    body = error_body(error.message, kind=kind, code=error.code, param=error.param)
    return ErrorResponse(body, status=status, headers=headers)


def grammar_blamed(error: RouterError, param: str | None) -> RouterError:
    """Add the parameter's name to a worker's error about a grammar, since workers do not know it."""
    if param is None or error.param is not None or error.code not in (GRAMMAR_REFUSED, GRAMMAR_FAILED):
        return error
    return InvalidRequestError(f"the parameter '{param}' is invalid: {error.message}", code=error.code, param=param)


def http_error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> ErrorResponse:
    """An error at the HTTP level: unknown path, wrong method."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = HTTPStatus(status).phrase.lower().replace(" ", "_")
    return ErrorResponse(error_body(message, kind=kind, code=code), status=status, headers=headers)


def invalid_body(error: ValidationError) -> InvalidRequestError:
    """Turn a validation error into a refusal: the first parameter to blame, and all problems found with it."""
    problems = error.errors(include_url=False)
    first = problems[0]
    if first["type"] == "json_invalid":
        return InvalidRequestError(f"the body is not valid JSON: {first['msg']}", code="invalid_json")
    for problem in problems:
        if isinstance(cause := problem.get("ctx", {}).get("error"), UnsupportedValueError):
            return cause.refusal(_place(problem["loc"]))
    name = _root(first["loc"])
    same = [problem | {"loc": _place(problem["loc"])} for problem in problems if _root(problem["loc"]) == name]
    if first["type"] in UNKNOWN and len(first["loc"]) == 1:
        return InvalidRequestError(f"unknown parameter '{name}'", code="unknown_parameter", param=name)
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return InvalidRequestError(f"the parameter '{name}' is required", code="missing_parameter", param=name)
    return InvalidRequestError(_sentence(name, same), code="invalid_parameter", param=name or None)


FORM_TAG = "~"
"""Prefix of the name of a form that a value may have; such a name is not part of the value's place."""

UNKNOWN = frozenset({"none_required", "extra_forbidden"})
"""Validation's error types for a field that a body does not have: it must be null, or must be absent."""


def _root(location: Sequence[int | str]) -> str:
    return str(location[0]) if location else ""


def _place(location: Sequence[int | str]) -> tuple[int | str, ...]:
    """The place in the body as sent, without the names of forms."""
    return tuple(part for part in location if not _names_form(str(part)))


def _names_form(part: str) -> bool:
    """True if a part of a place names a form that a value may have: ``list[str]``, ``function-after[...]``."""
    return part.startswith((FORM_TAG, "function-", "constrained-", "lax-or-strict", "json-or-python")) or (
        part.endswith("]") and "[" in part
    )


def _words(problem: Any) -> str:
    if problem["type"] in UNKNOWN:
        return "there is no such field"
    return str(problem["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")


def _names_class(place: Sequence[int | str]) -> bool:
    """True if a place contains a class name, one of several alternatives for a value. Then it is no place in the body,
    and all problems concern the value as a whole."""
    return any(isinstance(part, str) and part[:1].isupper() for part in place)


MAX_SHOWN_CHARACTERS = 40


def _value(problems: Sequence[Any]) -> str:
    """The value that was sent, if it is a number or a short word, and the problems do not quote it already."""
    value = problems[0].get("input")
    is_one = all(problem.get("input") is value for problem in problems)
    if not is_one or not isinstance(value, (bool, int, float, str)) or problems[0]["type"] in UNKNOWN:
        return ""
    shown = json.dumps(value, ensure_ascii=False)
    is_named = any("got " in str(problem["msg"]) for problem in problems)
    return "" if is_named or len(shown) > MAX_SHOWN_CHARACTERS else f", got {shown}"


def _sentence(name: str, problems: Sequence[Any]) -> str:
    places = [".".join(str(part) for part in problem["loc"]) for problem in problems]
    place = places[0]
    if _names_class(problems[0]["loc"]):
        place = name if len(set(places)) > 1 else place
    else:
        problems = [problem for problem, other in zip(problems, places, strict=True) if other == place]
    said = list(dict.fromkeys(_words(problem) for problem in problems))
    if not place:
        return f"invalid body: {said[0]}"
    return f"the parameter '{place}' is invalid: {'; or '.join(said[:6])}{_value(problems)}"
