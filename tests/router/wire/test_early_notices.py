"""Notices of coming requests: none reaches a replica that nobody would tell to free what it holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from engine.contract.messages import GenerateRequest, SamplingParams, TokenDelta
from engine.contract.token_ids import TokenIds
from router.pool.pool import ReplicaPool
from router.roles import ROLES
from router.settings import RouterSettings
from router.wire.worker_link import WorkerLink
from tests.support.router.router_rig import until
from tests.support.router.slow_pool import SlowPool

SETTINGS = RouterSettings()
REPLICA = "decode-0"


def request(name: str, client_id: str = "") -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=TokenIds.of((1,)),
        sampling=SamplingParams(max_tokens=2),
        client_id=client_id,
    )


@asynccontextmanager
async def busy_link() -> AsyncIterator[tuple[SlowPool, WorkerLink]]:
    """A link to a replica that has not answered the call with request ``first`` yet."""
    workers = SlowPool()
    pool = ReplicaPool(ROLES["decode"], workers, policy="prefix", settings=SETTINGS)
    await asyncio.gather(*pool.refresh())
    link = WorkerLink(workers, pool, settings=SETTINGS)
    first = run(link, "first")
    await until(lambda: workers.calls == [["first"]])
    yield workers, link
    workers.may_enter.set()
    await leave(first)
    await link.close()
    await pool.close()


def run(link: WorkerLink, name: str) -> asyncio.Task[TokenDelta]:
    replica = link.pool.get(REPLICA)
    assert replica is not None
    return asyncio.create_task(link.run(link.pool.reserve(replica), lambda client: request(name, client), print))


async def leave(task: asyncio.Task[TokenDelta]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def turns() -> None:
    """Let everything happen that needs no time."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("comes_itself", [True, False])
async def test_a_notice_that_waits_to_be_sent_is_not_sent_once_its_request_has_gone(comes_itself: bool) -> None:
    """Otherwise it came after the request's abort, and the replica held blocks for it until the prompt's deadline."""
    async with busy_link() as (workers, link):
        link.notices.give(REPLICA, request("a"))
        await turns()
        if comes_itself:
            coming = run(link, "a")
            await turns()
            await leave(coming)
        link.notices.withdraw("a")
        workers.may_enter.set()
        await turns()

        assert workers.calls == [["first"]]


async def test_a_request_goes_without_its_notice_if_that_was_not_sent_yet() -> None:
    async with busy_link() as (workers, link):
        link.notices.give(REPLICA, request("a"))
        await turns()
        coming = run(link, "a")
        await turns()
        workers.may_enter.set()
        await until(lambda: len(workers.calls) == 2)

        assert workers.calls == [["first"], ["a"]]
        await leave(coming)
