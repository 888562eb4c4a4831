"""The answer to a generation: a stream of events or one object, written as long as the client is connected."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.api.answers.answer_format import AnswerFormat, Collected
from router.api.errors import error_event, error_response, grammar_blamed
from router.api.http.patience import within
from router.errors import InternalError, RequestCancelledError, RouterError
from router.request.text_output import TextOutput, TextPiece

logger = logging.getLogger(f"baton.{__name__}")

Written = TypeVar("Written")

_MANY_LOGPROBS = 1_000
"""Answers with more log-probabilities are written in a thread: this many take some 10 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnding:
    """How a stream ends: its last bytes, and the event for an error after the stream has begun."""

    done: bytes = b"data: [DONE]\n\n"
    error_event: Callable[[RouterError], bytes] = error_event


OPENAI_ENDING = StreamEnding()


class GenerationResponse(Response):
    """Writes the outputs of a generation to the client.

    The status is sent with the first token, so that an earlier error becomes a status code, not an event. When the
    client disconnects, or the server gives this answer up, everything that still runs for it is cancelled.
    """

    def __init__(
        self,
        outputs: Sequence[TextOutput],
        answer: AnswerFormat,
        *,
        stream: bool,
        write_timeout_s: float,
        headers: Mapping[str, str] | None = None,
        ending: StreamEnding = OPENAI_ENDING,
    ) -> None:
        super().__init__()
        self._ending = ending
        self._own_headers = headers or {}
        self._write_timeout_s = write_timeout_s
        self._outputs = outputs
        self._answer = answer
        self._stream = stream
        self._opened: set[int] = set()
        self._is_client_gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await (self._send_stream if self._stream else self._send_whole)(scope, receive, send)
        finally:
            watcher.cancel()
            self._cancel()
            await asyncio.gather(watcher, return_exceptions=True)

    def _cancel(self) -> None:
        for output in self._outputs:
            output.cancel()

    async def _watch(self, receive: Receive) -> None:
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        except Exception as error:  # Serve's word for a proxy that died, and all its clients' connections with it
            logger.info("connection lost: request_id=%s: %r", self._outputs[0].generation.name_in_logs, error)
        self._is_client_gone = True
        self._cancel()

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        choices = [self._collected(output) for output in self._outputs]
        try:
            async for index, pieces in merged(self._outputs):
                for piece in pieces:
                    choices[index].add(piece)
            chosen = self._answer.head.chosen(choices)
            body = await self._written(
                functools.partial(self._answer.whole, chosen, self._outputs), num_logprobs=self._num_logprobs(chosen)
            )
        except Exception as error:
            await self._send_error(self._told(error), scope, receive, send)
            return
        response = Response(body, media_type="application/json", headers=self._own_headers)
        await self._in_time(response(scope, receive, send))

    def _collected(self, output: TextOutput) -> Collected:
        """The collector for the pieces of one output of an unstreamed answer."""
        return Collected(output)

    async def _send_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_one = len(self._outputs) == 1
        items = merged(self._outputs)
        try:
            # Closing an iterator that was started costs a task, so a single output does without one.
            first = (0, await self._outputs[0].take()) if is_one else await anext(items)
            events = b"".join(await self._written(functools.partial(self._events, *first)))
        except Exception as error:
            await self._send_error(self._told(error), scope, receive, send)
            return
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *((name.lower().encode(), value.encode()) for name, value in self._own_headers.items()),
        ]
        await self._in_time(send({"type": "http.response.start", "status": 200, "headers": headers}))
        try:
            if is_one:
                events = await self._send_rest_of_one(send, events)
            else:
                await self._write(send, events)
                async for index, pieces in items:
                    events = b"".join(await self._written(functools.partial(self._events, index, pieces)))
                    await self._write(send, events)
                events = b""
            last = events + (self._answer.usage_event(self._outputs) if self._answer.head.include_usage else b"")
        except Exception as error:
            last = self._ending.error_event(self._told(error))
        await self._write(send, last + self._ending.done, is_last=True)

    def _told(self, error: Exception) -> RouterError:
        """The error to send to the client; an unexpected error is logged, and replaced by an internal one."""
        if isinstance(error, RouterError):
            return grammar_blamed(error, self._answer.head.grammar_param)
        logger.error("answer failed: request_id=%s", self._outputs[0].generation.name_in_logs, exc_info=error)
        return InternalError()

    async def _written(self, write: Callable[[], Written], *, num_logprobs: int = 0) -> Written:
        """Run ``write`` directly, or in a thread if it takes long, so that other streams continue."""
        takes_long = self._answer.head.tells_of_prompts or num_logprobs > _MANY_LOGPROBS
        return await asyncio.to_thread(write) if takes_long else write()

    def _num_logprobs(self, choices: Sequence[Collected]) -> int:
        """Number of log-probabilities of output tokens in the choices."""
        logprobs = self._answer.head.logprobs
        return 0 if logprobs is None else sum(len(choice.entries) for choice in choices) * (1 + logprobs.num_top)

    async def _send_rest_of_one(self, send: Send, events: bytes) -> bytes:
        """Write a single choice, from its first events on. Nearly all tokens take this path, so it avoids ``merged``.

        Returns:
            The choice's last events, to be written together with the end of the stream.
        """
        output, event = self._outputs[0], self._answer.event
        while not output.is_finished:
            await self._write(send, events)
            if not (pieces := await output.take()):
                return b""
            events = b"".join([event(0, piece, output) for piece in pieces])
        return events

    def _events(self, index: int, pieces: Sequence[TextPiece]) -> list[bytes]:
        """The events of a choice's pieces; the first ones are preceded by the opening events."""
        output = self._outputs[index]
        opening = b"" if index in self._opened else self._answer.opening(index, output)
        self._opened.add(index)
        return [opening, *(self._answer.event(index, piece, output) for piece in pieces)]

    async def _write(self, send: Send, events: bytes, *, is_last: bool = False) -> None:
        if events and not self._is_client_gone:
            await self._in_time(send({"type": "http.response.body", "body": events, "more_body": not is_last}))

    async def _in_time(self, sending: Awaitable[None]) -> None:
        """Await a send; give up a client that does not read."""
        try:
            await within(sending, self._write_timeout_s)
        except OSError as error:
            # A timeout, or the error that the server raises once the connection is lost. The server closes the
            # connection of an answer that stays incomplete.
            logger.info("client does not read: request_id=%s: %r", self._outputs[0].generation.name_in_logs, error)
            self._is_client_gone = True
            self._cancel()

    async def _send_error(self, error: RouterError, scope: Scope, receive: Receive, send: Send) -> None:
        if not (self._is_client_gone and isinstance(error, RequestCancelledError)):
            await self._in_time(error_response(error)(scope, receive, send))


async def merged(outputs: Sequence[TextOutput]) -> AsyncIterator[tuple[int, list[TextPiece]]]:
    """The pieces of all outputs as they arrive, with the output's index, until all have finished.

    Raises:
        RouterError: One of them failed.
    """
    if len(outputs) == 1:
        while pieces := await outputs[0].take():
            yield 0, pieces
        return
    takes = {asyncio.ensure_future(output.take()): index for index, output in enumerate(outputs)}
    try:
        while takes:
            done, _ = await asyncio.wait(takes, return_when=asyncio.FIRST_COMPLETED)
            for take in done:
                index = takes.pop(take)
                if pieces := take.result():
                    yield index, pieces
                    takes[asyncio.ensure_future(outputs[index].take())] = index
    finally:
        for take in takes:
            take.cancel()
        await asyncio.gather(*takes, return_exceptions=True)
