"""Calls on behalf of many requests are made outside of any one request's context."""

from __future__ import annotations

import asyncio
import contextvars

import pytest
from ray.serve.context import _get_serve_request_context, _set_request_context

from cluster.serve.replica_caller import in_fresh_context


@pytest.fixture(params=["in a request", "outside of requests"])
def is_in_request(request: pytest.FixtureRequest) -> bool:
    return request.param == "in a request"


def enter_request(is_in_request: bool) -> None:
    """In the test's own task: a fixture has another context."""
    if is_in_request:
        _set_request_context(request_id="its id", _internal_request_id="its other id")


async def test_request_that_is_handled_is_not_seen(is_in_request: bool) -> None:
    enter_request(is_in_request)

    async def read() -> str:
        return _get_serve_request_context()._internal_request_id

    assert await in_fresh_context(read(), contextvars.Context()) == ""


async def test_call_cancelled_by_the_replica_is_no_cancellation_of_the_caller(is_in_request: bool) -> None:
    enter_request(is_in_request)

    async def cancelled_there() -> None:
        raise asyncio.CancelledError

    with pytest.raises(ConnectionAbortedError):
        await in_fresh_context(cancelled_there(), contextvars.Context())


async def test_cancelling_the_caller_cancels_the_call(is_in_request: bool) -> None:
    enter_request(is_in_request)
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
