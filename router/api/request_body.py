"""Reading a body: bounded while it arrives, then validated in one go."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from router.api.errors import invalid_body
from router.errors import BodyTooLargeError, RequestCancelledError

BodyT = TypeVar("BodyT", bound=BaseModel)


async def read_body(request: Request, model: type[BodyT], *, max_body_bytes: int) -> BodyT:
    """The validated body.

    Raises:
        BodyTooLargeError: It is larger than allowed; no more than that was read.
        RequestCancelledError: The client left before it was complete.
        InvalidRequestError: It is not JSON, or not what ``model`` takes.
    """
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_body_bytes:
        raise BodyTooLargeError(max_body_bytes=max_body_bytes)
    raw = bytearray()
    try:
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > max_body_bytes:
                raise BodyTooLargeError(max_body_bytes=max_body_bytes)
    except ClientDisconnect:
        raise RequestCancelledError from None
    try:
        return model.model_validate_json(bytes(raw))
    except ValidationError as error:
        raise invalid_body(error) from error
