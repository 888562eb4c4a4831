"""ASGI middleware in Serve's HTTP proxies that limits the memory for request bodies in flight.

Serve's proxy forwards every body as fast as it arrives, and the router's process buffers it even if the router does not
read it. Without a limit both would hold as much as clients send. A variable tells Serve to use this middleware
(``cluster.deploy.serve_env``). HAProxy limits its own buffers; behind it Serve puts this in front of each router.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api.errors import error_response
from router.api.http.request_body import SMALL_BODY_BYTES
from router.body_room import BodyRoom
from router.errors import BodyTooLargeError, NoReplicaError, RouterError
from router.settings import RouterSettings

STEP_BYTES = 1024 * 1024
"""A body of unknown length reserves room in steps of this size."""

STARTING_S = 30.0
"""For this long after its start a proxy may not know yet which applications Serve runs."""

DEFAULTS = RouterSettings()
RETRY_AFTER_S = DEFAULTS.retry_after_s
NOT_FOUND = 404
GONE: Message = {"type": "http.disconnect"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyLimits:
    """The limits of one proxy. ``router.settings`` describes the fields."""

    max_body_bytes: int | None = None
    max_reading_bytes: int = DEFAULTS.max_reading_bytes
    reading_wait_s: float = DEFAULTS.reading_wait_s

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> Self:
        """The limits that `baton serve` set for its own Ray, or that the operator of a shared Ray set."""
        max_body_bytes = environment.get("BATON_PROXY_MAX_BODY_BYTES")
        return cls(
            max_body_bytes=None if max_body_bytes is None else int(max_body_bytes),
            max_reading_bytes=int(environment.get("BATON_PROXY_MAX_READING_BYTES", DEFAULTS.max_reading_bytes)),
            reading_wait_s=float(environment.get("BATON_PROXY_READING_WAIT_S", DEFAULTS.reading_wait_s)),
        )


class ProxyGuard:
    """ASGI middleware. A body over 64 KiB holds reserved room from before it is read until its answer begins."""

    def __init__(self, app: ASGIApp, *, limits: ProxyLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._limits = limits
        self._clock = clock
        self._until_s = clock() + STARTING_S
        self._room = BodyRoom(
            max_bytes=limits.max_reading_bytes,
            wait_s=limits.reading_wait_s,
            retry_after_s=RETRY_AFTER_S,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Small requests pass unchanged, once the proxy has had time to learn the routes."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        num_bytes = _announced_bytes(scope)
        is_starting = self._clock() < self._until_s
        if num_bytes is not None and num_bytes <= SMALL_BODY_BYTES and not is_starting:
            await self._app(scope, receive, send)
            return
        passage = _Passage(receive, send, self._room, self._limits, num_bytes=num_bytes, is_starting=is_starting)
        try:
            await self._app(scope, passage.receive, passage.send)
        finally:
            passage.leave()
        if passage.refusal is not None and not passage.is_answered:
            await error_response(passage.refusal)(scope, receive, send)


class _Passage:
    """One request that passes the guard. ``refusal`` is the error that the client gets instead of an answer."""

    def __init__(
        self,
        receive: Receive,
        send: Send,
        room: BodyRoom,
        limits: ProxyLimits,
        *,
        num_bytes: int | None,
        is_starting: bool,
    ) -> None:
        self._receive = receive
        self._send = send
        self._room = room
        self._max_bytes = limits.max_body_bytes or limits.max_reading_bytes
        self._num_announced = num_bytes
        self._is_starting = is_starting
        self._num_read = 0
        self._num_taken = 0
        self.is_answered = False
        self.refusal: RouterError | None = None

    async def receive(self) -> Message:
        """The client's next message, once there is room. To the application, a refused client seems disconnected."""
        if self.refusal is not None:
            return GONE
        try:
            if self._num_announced is not None and not self.is_answered:
                await self._take_up_to(self._num_announced)
            message = await self._receive()
            if message["type"] == "http.request" and not self.is_answered:
                self._num_read += len(message.get("body", b""))
                await self._take_up_to(self._num_read)
        except RouterError as error:
            self.refusal = error
            return GONE
        return message

    async def send(self, message: Message) -> None:
        """Pass the answer on. Room is given back when the answer begins, since the body has been read by then."""
        if self.refusal is not None and not self.is_answered:
            return
        if message["type"] == "http.response.start":
            self.leave()
            if self._is_starting and _is_serves_own(message):
                reason = "its proxy has just started"
                self.refusal = NoReplicaError(role="router", retry_after_s=RETRY_AFTER_S, reason=reason)
                return
            self.is_answered = True
        await self._send(message)

    def leave(self) -> None:
        """Give the room back."""
        self._room.give_back(self._num_taken)
        self._num_taken = 0

    async def _take_up_to(self, num_bytes: int) -> None:
        """Reserve room for ``num_bytes`` of the body; in larger steps if the body's length is not known.

        Raises:
            BodyTooLargeError, BodiesFullError: There is no room.
        """
        if num_bytes > self._max_bytes:
            raise BodyTooLargeError(max_body_bytes=self._max_bytes)
        if num_bytes <= SMALL_BODY_BYTES or num_bytes <= self._num_taken:
            return
        more = num_bytes - self._num_taken
        if self._num_announced is None:
            more = min(max(more, STEP_BYTES), self._max_bytes - self._num_taken)
        await self._room.take(more)
        self._num_taken += more


def _announced_bytes(scope: Scope) -> int | None:
    """The length of the body; None when it is not known. A request with neither header has no body."""
    length = b"0"
    for name, value in scope["headers"]:
        if name == b"transfer-encoding":
            return None
        if name == b"content-length":
            length = value
    return int(length[:20]) if length.isdigit() else None


def _is_serves_own(start: Message) -> bool:
    """True for a 404 of the proxy itself, which does not know the routers yet. Routers always answer with JSON."""
    kind = Headers(raw=list(start.get("headers", []))).get("content-type", "")
    return start["status"] == NOT_FOUND and not kind.startswith("application/json")
