"""Requests of one caller in the engine's own process: each over a stream of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

from engine.contract.messages import GenerateRequest, TokenDelta
from engine.frontend.async_engine import AsyncEngine


async def generate(engine: AsyncEngine, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
    """Yield the deltas of one request. Closing the iterator aborts it.

    Raises:
        RequestRefusedError: The engine can never serve it.
    """
    client_id = f"caller of {request.request_id}"
    messages = engine.outputs(client_id)
    try:
        await anext(messages)
        (refusal,) = await engine.submit([replace(request, client_id=client_id)])
        if refusal is not None:
            raise refusal
        async for message in messages:
            for delta in message.deltas:
                yield delta
                if delta.finish_reason is not None:
                    return
        raise AssertionError("the stream ended before the request")
    finally:
        await messages.aclose()  # type: ignore[attr-defined]  # the engine's iterator is a generator


async def run_to_end(engine: AsyncEngine, request: GenerateRequest) -> TokenDelta:
    """The last delta of one request, with the tokens of all. Cancelling it aborts the request.

    Raises:
        RequestRefusedError: The engine can never serve it.
    """
    deltas = [delta async for delta in generate(engine, request)]
    return deltas[-1]._replace(token_ids=tuple(token for delta in deltas for token in delta.token_ids))
