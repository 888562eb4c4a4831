"""Awaits with a deadline, at no cost if nothing has to wait."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any

from starlette.types import Message, Send


class PatientSend:
    """A ``send`` that gives up a client that leaves a message unread for ``timeout_s``.

    An error that the server raises for a departed client is treated the same.
    """

    def __init__(self, send: Send, *, timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self.gave_up = False

    async def __call__(self, message: Message) -> None:
        """Send one message."""
        try:
            await within(self._send(message), self._timeout_s)
        except OSError:
            self.gave_up = True
            raise


async def within(awaitable: Awaitable[None], timeout_s: float) -> None:
    """Await within ``timeout_s``.

    Most writes complete without waiting, and then no timer is set: to set and cancel one for every token of every
    stream would cost more than the write.

    Raises:
        TimeoutError: The awaitable did not complete in time, and was cancelled.
    """
    if type(awaitable) is not types.CoroutineType:
        async with asyncio.timeout(timeout_s):
            await awaitable
        return
    try:
        waits_for = awaitable.send(None)
    except StopIteration:
        return
    async with asyncio.timeout(timeout_s):
        await _rest(awaitable, waits_for)


@types.coroutine
def _rest(coroutine: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """Continue a coroutine that was started, from its first awaited object on."""
    while True:
        failure: BaseException | None = None
        sent: Any = None
        try:
            sent = yield waits_for
        except BaseException as error:
            failure = error
        try:
            waits_for = coroutine.send(sent) if failure is None else coroutine.throw(failure)
        except StopIteration:
            return
