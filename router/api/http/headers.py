"""What callers say in headers."""

from __future__ import annotations

import math

from starlette.requests import Request

from router.errors import InvalidRequestError
from router.service import RouterService

TIMEOUT_HEADER = "X-Request-Timeout"
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
