"""Executes a router's calls over its connection, and answers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.contract.call_frame import Answer, CallError, Move, Submit, pack_answer, unpack_call
from engine.contract.errors import EngineError, RequestRefusedError
from engine.contract.messages import GenerateRequest, RequestError


class CalledEngine(Protocol):
    """The part of an engine that calls reach (:class:`AsyncEngine`)."""

    async def submit(self, requests: Sequence[GenerateRequest]) -> Sequence[RequestRefusedError | None]:
        """Add requests; one answer each, in order."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests."""

    async def move_out(self, request_ids: Sequence[str], *, only_waiting: bool = False) -> None:
        """Have requests leave for another engine; with ``only_waiting``, only waiting ones."""


async def answer_call(engine: CalledEngine, frame: bytes) -> bytes:
    """The answer to one call; a failure if the engine is dead or the call cannot be read."""
    try:
        call = unpack_call(frame)
        if isinstance(call, Submit):
            refusals = [_refusal(error) for error in await engine.submit(call.requests)]
            return pack_answer(Answer(refusals=tuple(refusals)))
        if isinstance(call, Move):
            await engine.move_out(call.request_ids, only_waiting=call.only_waiting)
        else:
            await engine.abort(call.request_ids)
        return pack_answer(Answer())
    except (CallError, EngineError) as error:
        return pack_answer(Answer(failure=f"{type(error).__name__}: {error}"))


def _refusal(error: RequestRefusedError | None) -> RequestError | None:
    return RequestError(code=error.code, message=str(error)) if error is not None else None
