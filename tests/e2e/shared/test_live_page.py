"""The live page of a real cluster in a browser: it shows that a worker is killed, and that a new one starts."""

from __future__ import annotations

import asyncio
import os
import signal

from playwright.async_api import expect

from tests.support.cluster.cluster import READY_TIMEOUT_S, ClusterProcess
from tests.support.cluster.http_completions import read_status
from tests.support.router.browser import browsing

PATIENCE_MS = 1000 * READY_TIMEOUT_S
FOLLOWED_WITHIN_MS = 3000
"""The page's promise: the router samples its cluster once a second while somebody watches."""


async def until_the_router_knows(url: str, replica_id: str) -> None:
    """Return when a router leaves a worker out, or has it no more."""
    async with asyncio.timeout(READY_TIMEOUT_S):
        while True:
            pools = (await asyncio.to_thread(read_status, url))["pools"]
            rows = {row["replica_id"]: row for pool in pools.values() for row in pool}
            if replica_id not in rows or rows[replica_id]["is_left_out"]:
                return


async def test_page_follows_a_killed_worker(wide_cluster: ClusterProcess) -> None:
    """The page shows that a worker is lost within 3 s after the router knows it, which it does at once: the worker's
    stream breaks. The one test whose wait is bounded by what was promised, and not by patience: following within 3 s is
    what the page is for, and there is nothing but time in between that another assertion could look at.
    """
    async with browsing(wide_cluster.url) as opened:
        page = opened.page
        await expect(page.locator(".card.running")).to_have_count(4, timeout=PATIENCE_MS)
        lost = read_status(wide_cluster.url)["pools"]["decode"][0]
        os.kill(lost["pid"], signal.SIGKILL)
        await until_the_router_knows(wide_cluster.url, lost["replica_id"])

        running = page.locator(f'.card.running[data-replica="{lost["replica_id"]}"]')
        await expect(running).to_have_count(0, timeout=FOLLOWED_WITHIN_MS)
        await expect(page.locator("#timeline")).to_contain_text(f"is gone {lost['replica_id']}", timeout=PATIENCE_MS)
        await expect(page.locator(".card.running")).to_have_count(4, timeout=PATIENCE_MS)

        await page.fill("#message", "hello")
        await page.press("#message", "Enter")
        await expect(page.locator("#waterfall .span b").get_by_text("decode", exact=True)).to_be_visible(
            timeout=PATIENCE_MS
        )
        await expect(page.locator(".turn.error")).to_have_count(0)
        assert opened.complaints == []
    wide_cluster.wait_until_pools_have(2)
