"""The live page in a browser, over a router with fake workers."""

from __future__ import annotations

from pathlib import Path

from playwright.async_api import expect

from router.security import SecuritySettings, hash_key, new_key
from tests.support.router.browser import browsing
from tests.support.router.live_app import live_app
from tests.support.router.router_rig import router_rig


async def test_page_shows_the_workers_and_complains_of_nothing(model_dir: Path) -> None:
    async with router_rig(model_dir, num_prefill=2) as rig, live_app(rig.app) as url, browsing(url) as opened:
        page = opened.page
        await expect(page.locator(".card.running")).to_have_count(3)
        await expect(page.locator("#connection-text")).to_have_text("live")
        rig.prefill.add("prefill-9")
        await expect(page.locator('.card.running[data-replica="prefill-9"]')).to_be_visible()
        await expect(page.locator("#timeline")).to_contain_text("prefill worker came prefill-9")

        assert opened.complaints == []


async def test_playground_streams_an_answer_and_shows_its_trace(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig, live_app(rig.app) as url, browsing(url) as opened:
        page = opened.page
        await page.get_by_text("Parameters").click()
        await page.fill("#max-tokens", "7")
        await page.fill("#system", "be brief")
        await page.fill("#message", "hello")
        await page.press("#message", "Enter")

        for part in ("tokenize", "queue", "prefill", "transfer", "decode"):
            await expect(page.locator("#waterfall .span:not(.child) b").get_by_text(part, exact=True)).to_be_visible()
        await expect(page.locator(".turn.assistant")).not_to_have_text("…")
        assert rig.decode[0].seen[0].sampling.max_tokens == 7


async def test_page_asks_for_a_key_and_tells_why(model_dir: Path) -> None:
    user, admin = new_key(), new_key()
    security = SecuritySettings(api_keys=(hash_key(user),), admin_keys=(hash_key(admin),))
    async with router_rig(model_dir, security=security) as rig, live_app(rig.app) as url, browsing(url) as opened:
        page = opened.page
        await expect(page.locator("#refused-reason")).to_contain_text("key")
        await expect(page.locator(".card")).to_have_count(0)
        await page.fill("#key", user)
        await page.press("#key", "Enter")
        await expect(page.locator("#refused-reason")).to_contain_text("admin")
        await page.fill("#key", admin)
        await page.press("#key", "Enter")
        await expect(page.locator(".card.running")).to_have_count(2)
        await expect(page.locator("#refused")).to_be_hidden()

        kept = await page.evaluate("[localStorage.length, document.cookie, sessionStorage.length]")
        assert kept == [0, "", 1]


async def test_orders_ask_first(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig, live_app(rig.app) as url, browsing(url) as opened:
        page = opened.page
        drain = page.get_by_role("button", name="Drain decode-0")
        await drain.click()
        await page.get_by_role("button", name="Cancel").click()
        assert rig.decode.drained == []

        await drain.click()
        await page.get_by_role("button", name="Yes").click()
        await expect(page.locator("#toast")).to_contain_text("decode-0 drains")
        assert rig.decode.drained == ["decode-0"]
