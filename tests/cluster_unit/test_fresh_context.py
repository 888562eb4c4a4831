"""Calls on behalf of many requests are made outside of any one request's context."""

from __future__ import annotations

import asyncio
import contextvars

import pytest

from cluster.replica_caller import in_fresh_context

REQUEST: contextvars.ContextVar[str] = contextvars.ContextVar("REQUEST", default="none")


async def test_callers_context_is_not_seen() -> None:
    REQUEST.set("mine")

    async def read() -> str:
        return REQUEST.get()

    assert await in_fresh_context(read(), contextvars.Context()) == "none"


async def test_call_cancelled_by_the_replica_is_no_cancellation_of_the_caller() -> None:
    async def cancelled_there() -> None:
        raise asyncio.CancelledError

    with pytest.raises(ConnectionAbortedError):
        await in_fresh_context(cancelled_there(), contextvars.Context())


async def test_cancelling_the_caller_cancels_the_call() -> None:
    has_begun, was_cancelled = asyncio.Event(), asyncio.Event()

    async def call() -> None:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            was_cancelled.set()
            raise

    caller = asyncio.create_task(in_fresh_context(call(), contextvars.Context()))
    await has_begun.wait()
    caller.cancel()

    with pytest.raises(asyncio.CancelledError):
        await caller
    assert was_cancelled.is_set()
