"""Reading a body: bounded while it arrives and before it is parsed, then validated in one go."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from router.api.errors import invalid_body
from router.api.json_size import JsonSize, exact_size, rough_size
from router.errors import (
    BodyNotJsonError,
    BodyTimeoutError,
    BodyTooLargeError,
    RequestCancelledError,
    TooManyValuesError,
)
from router.settings import RouterSettings

BodyT = TypeVar("BodyT", bound=BaseModel)

_OBJECT_WEIGHT = 24
_ARRAY_WEIGHT = 2
"""Validating a number takes 0.2 us, a list 0.5 us, a message of a chat 6 us: containers count for more."""


async def read_body(request: Request, model: type[BodyT], *, settings: RouterSettings) -> BodyT:
    """The validated body.

    Raises:
        BodyNotJsonError: It does not say that it is JSON.
        BodyTooLargeError: It is larger than allowed; no more than that was read.
        BodyTimeoutError: It did not arrive in time.
        TooManyValuesError: Validating it would hold up everybody else.
        RequestCancelledError: The client left before it was complete.
        InvalidRequestError: It is not JSON, or not what ``model`` takes.
    """
    _check_media_type(request.headers.get("content-type", ""))
    try:
        async with asyncio.timeout(settings.read_timeout_s):
            raw = await _read(request, settings.max_body_bytes)
    except TimeoutError:
        raise BodyTimeoutError(timeout_s=settings.read_timeout_s) from None
    if weight(rough_size(raw)) > settings.max_body_values:
        size = await asyncio.to_thread(exact_size, raw)
        if weight(size) > settings.max_body_values:
            raise TooManyValuesError(
                num_values=size.num_values, num_objects=size.num_objects, max_body_values=settings.max_body_values
            )
    try:
        with _without_garbage_collection():
            return model.model_validate_json(raw)
    except ValidationError as error:
        raise invalid_body(error) from error


def weight(size: JsonSize) -> int:
    """What a JSON text costs to validate, in numbers of a list."""
    return size.num_values + _OBJECT_WEIGHT * size.num_objects + _ARRAY_WEIGHT * size.num_arrays


def _check_media_type(content_type: str) -> None:
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise BodyNotJsonError(media_type=media_type)


async def _read(request: Request, max_body_bytes: int) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length[:20]) > max_body_bytes:
        raise BodyTooLargeError(max_body_bytes=max_body_bytes)
    raw = bytearray()
    try:
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > max_body_bytes:
                raise BodyTooLargeError(max_body_bytes=max_body_bytes)
    except ClientDisconnect:
        raise RequestCancelledError from None
    return bytes(raw)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Nothing that is made meanwhile is garbage: looking for some doubles the time of a large body."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
