"""Reads a body: bounded while it arrives and before it is parsed, then validated in one go."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from router.api.errors import invalid_body
from router.api.http.value_bound import check_num_values
from router.body_room import BodyRoom
from router.errors import (
    BodyEncodedError,
    BodyNotJsonError,
    BodyTimeoutError,
    BodyTooLargeError,
    RequestCancelledError,
)
from router.settings import RouterSettings

BodyT = TypeVar("BodyT", bound=BaseModel)

logger = logging.getLogger(f"baton.{__name__}")

SMALL_BODY_BYTES = 64 * 1024
"""Larger bodies need room. HTTP servers buffer this much of each connection in any case."""


class _Share:
    """One body's share of the room."""

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self.num_bytes = 0

    async def take(self, num_bytes: int) -> None:
        await self._room.take(num_bytes)
        self.num_bytes = num_bytes

    def give_back(self) -> None:
        if self.num_bytes:
            self._room.give_back(self.num_bytes)


@asynccontextmanager
async def read_body(
    request: Request, model: type[BodyT], *, settings: RouterSettings, room: BodyRoom
) -> AsyncIterator[BodyT]:
    """Read and validate a body, which keeps its share of ``room`` until the context is left.

    Raises:
        BodiesFullError: Other bodies took all the room for too long.
        BodyNotJsonError: It does not say that it is JSON.
        BodyEncodedError: It is compressed.
        BodyTooLargeError: It is larger than allowed; no more than that was read.
        BodyTimeoutError: It did not arrive in time.
        TooManyValuesError: Validating it would delay all other requests.
        RequestCancelledError: The client left before it was complete.
        InvalidRequestError: It is not JSON, or not valid for ``model``.
    """
    share = _Share(room)
    try:
        yield await _validated(request, model, settings, share)
    finally:
        share.give_back()


async def _validated(request: Request, model: type[BodyT], settings: RouterSettings, share: _Share) -> BodyT:
    _check_media_type(request.headers.get("content-type", ""))
    _check_coding(request.headers.get("content-encoding", ""))
    raw = await _read(request, settings, share)
    await check_num_values([raw], max_body_values=settings.max_body_values)
    try:
        with _without_garbage_collection():
            return model.model_validate_json(raw)
    except ValidationError as error:
        raise invalid_body(error) from error


def _check_media_type(content_type: str) -> None:
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise BodyNotJsonError(media_type=media_type)


def _check_coding(coding: str) -> None:
    if coding.strip().lower() not in ("", "identity"):
        raise BodyEncodedError(coding=coding)


async def _read(request: Request, settings: RouterSettings, share: _Share) -> bytes:
    limit = settings.max_body_bytes
    num_bytes = _announced_bytes(request)
    if num_bytes is not None and num_bytes > limit:
        raise BodyTooLargeError(max_body_bytes=limit)
    raw = bytearray()
    try:
        async with asyncio.timeout(settings.read_timeout_s) as deadline:
            async for chunk in _chunks(request):
                raw += chunk
                if len(raw) > limit:
                    raise BodyTooLargeError(max_body_bytes=limit)
                if len(raw) > SMALL_BODY_BYTES and not share.num_bytes:
                    async with _stopped(deadline):
                        await share.take(limit if num_bytes is None else num_bytes)
    except TimeoutError:
        raise BodyTimeoutError(timeout_s=settings.read_timeout_s) from None
    return bytes(raw)


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    """The body as it arrives.

    Raises:
        RequestCancelledError: The connection is lost before it is complete.
    """
    stream = request.stream()
    while True:
        try:
            chunk = await anext(stream, None)
        except ClientDisconnect:
            raise RequestCancelledError from None
        except Exception as error:  # Serve's word for a proxy that died, and all its clients' connections with it
            logger.info("connection lost before the body was complete: %r", error)
            raise RequestCancelledError from None
        if chunk is None:
            return
        yield chunk


def _announced_bytes(request: Request) -> int | None:
    """The announced length of the body; None if unknown. With a transfer coding the header does not count."""
    length = request.headers.get("content-length", "")
    if not length.isdecimal() or "transfer-encoding" in request.headers:
        return None
    return int(length[:20])


@asynccontextmanager
async def _stopped(deadline: asyncio.Timeout) -> AsyncIterator[None]:
    """Stop the client's deadline while the router itself waits."""
    loop = asyncio.get_running_loop()
    until_s = deadline.when()
    assert until_s is not None
    left_s = until_s - loop.time()
    deadline.reschedule(None)
    yield
    deadline.reschedule(loop.time() + left_s)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause garbage collection: parsing makes no garbage, and collections would double the time of a large body."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
