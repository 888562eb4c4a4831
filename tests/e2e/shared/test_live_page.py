"""The live page of a real cluster, in a browser: it follows a worker that is killed, and the one that comes for it."""

from __future__ import annotations

import os
import signal

from playwright.async_api import expect

from tests.support.cluster.cluster import READY_TIMEOUT_S, ClusterProcess
from tests.support.cluster.http_completions import read_status
from tests.support.router.browser import browsing

PATIENCE_MS = 1000 * READY_TIMEOUT_S


async def test_page_follows_a_killed_worker(wide_cluster: ClusterProcess) -> None:
    async with browsing(wide_cluster.url) as opened:
        page = opened.page
        await expect(page.locator(".card.running")).to_have_count(4, timeout=PATIENCE_MS)
        lost = read_status(wide_cluster.url)["pools"]["decode"][0]
        os.kill(lost["pid"], signal.SIGKILL)

        await expect(page.locator("#timeline")).to_contain_text(f"is gone {lost['replica_id']}", timeout=PATIENCE_MS)
        await expect(page.locator(f'.card.running[data-replica="{lost["replica_id"]}"]')).to_have_count(0)
        await expect(page.locator(".card.running")).to_have_count(4, timeout=PATIENCE_MS)

        await page.fill("#message", "hello")
        await page.press("#message", "Enter")
        await expect(page.locator("#waterfall .span b").get_by_text("decode", exact=True)).to_be_visible()
        await expect(page.locator(".turn.error")).to_have_count(0)
        assert opened.complaints == []
    wide_cluster.wait_until_pools_have(2)
