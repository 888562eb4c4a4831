"""Reads the request headers that callers may set."""

from __future__ import annotations

import math

from starlette.requests import Request

from engine.contract.promise import MAX_PROMISE_MS, Promise
from engine.contract.tracing.request_timings import TraceContext
from router.errors import InvalidRequestError
from router.service import RouterService

TIMEOUT_HEADER = "X-Request-Timeout"
TTFT_HEADER, ITL_HEADER = "X-SLO-TTFT-Ms", "X-SLO-ITL-Ms"

MAX_SESSION_CHARACTERS = 256


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
            f"{TIMEOUT_HEADER} must be a number of seconds above 0, up to {service.settings.max_timeout_s:g}, "
            f"got {text[:40]!r}",
            code="invalid_parameter",
            param=TIMEOUT_HEADER,
        )
    return timeout_s


def promise_headers(request: Request) -> Promise:
    """The promise that the caller asks for.

    Raises:
        InvalidRequestError: A value is no positive number, or more than an hour.
    """
    return Promise(ttft_ms=_milliseconds(request, TTFT_HEADER), itl_ms=_milliseconds(request, ITL_HEADER))


def _milliseconds(request: Request, name: str) -> float | None:
    text = request.headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value <= MAX_PROMISE_MS:
        raise InvalidRequestError(
            f"{name} must be a number of milliseconds above 0, up to {MAX_PROMISE_MS:.0f}, got {text[:40]!r}",
            code="invalid_parameter",
            param=name,
        )
    return value


def caller_context(request: Request) -> TraceContext:
    """The caller's span context from the W3C headers, not validated here."""
    headers = request.headers
    return TraceContext(traceparent=headers.get("traceparent", ""), tracestate=headers.get("tracestate", ""))


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
