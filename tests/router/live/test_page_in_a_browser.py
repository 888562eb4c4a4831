"""The live page in a browser, over a router with fake workers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from playwright.async_api import Page, Route, expect

from kv_transfer.fault_options import FaultOptions
from router.security import SecuritySettings, hash_key, new_key
from tests.support.router.browser import TIMEOUT_MS, browsing
from tests.support.router.live_app import live_app
from tests.support.router.router_rig import FAST, router_rig


async def test_page_shows_the_workers_and_complains_of_nothing(model_dir: Path) -> None:
    async with router_rig(model_dir, num_prefill=2) as rig, live_app(rig.app) as url, browsing(url) as opened:
        page = opened.page
        await expect(page.locator(".card.running")).to_have_count(3)
        await expect(page.locator("#connection-text")).to_have_text("live")
        rig.prefill.add("prefill-9")
        await expect(page.locator('.card.running[data-replica="prefill-9"]')).to_be_visible()
        await expect(page.locator("#timeline")).to_contain_text("prefill worker started prefill-9")

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


async def test_faults_are_offered_only_where_they_are_allowed(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig, live_app(rig.app) as url, browsing(url) as opened:
        await expect(opened.page.locator(".card.running")).to_have_count(2)
        await expect(opened.page.locator("#faults")).to_be_hidden()


async def test_faults_begin_and_end_when_they_are_meant(model_dir: Path) -> None:
    settings = replace(FAST, allows_faults=True)
    async with router_rig(model_dir, settings=settings) as rig, live_app(rig.app) as url, browsing(url) as opened:
        page = opened.page
        await page.select_option("#fault", "bit_flips")
        await page.fill("#fault-share", "0.5")
        await page.select_option("#fault-role", "decode")
        await page.click("#faults-begin")
        await page.get_by_role("button", name="Cancel").click()
        assert rig.decode.faults == {}

        await page.click("#faults-begin")
        await page.get_by_role("button", name="Yes").click()
        await expect(page.locator("#timeline")).to_contain_text("decode workers get injected faults: bit_flips 0.5")
        assert (rig.decode.faults, rig.prefill.faults) == ({"decode-0": FaultOptions(bit_flips=0.5)}, {})

        await page.click("#faults-end")
        await page.get_by_role("button", name="Yes").click()
        await expect(page.locator("#toast")).to_contain_text("no more injected faults")
        assert set(rig.decode.faults.values()) | set(rig.prefill.faults.values()) == {FaultOptions()}
        assert opened.complaints == []


async def test_one_of_the_last_requests_is_opened(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig, live_app(rig.app) as url:
        await rig.complete([7] * 9, max_tokens=3, n=2, seed=1)
        refused = await rig.complete([7] * 9, temperature=-1.0)
        async with browsing(url) as opened:
            page = opened.page
            await page.locator("#recent li button").last.click()
            await expect(page.locator("#waterfall")).to_contain_text("2 choices")
            await expect(page.locator("#waterfall h3").get_by_text("Choice 2")).to_be_visible()

            await page.locator("#recent li button").first.click()
            await expect(page.locator("#waterfall .trouble")).to_have_text(refused.json()["error"]["message"])
            assert opened.complaints == []


async def test_what_was_cleared_or_stopped_is_not_part_of_the_conversation(model_dir: Path) -> None:
    asked: list[list[dict[str, str]]] = []

    async def never(route: Route) -> None:
        asked.append(json.loads(route.request.post_data or "")["messages"])

    async def says(page: Page, text: str) -> None:
        await page.fill("#message", text)
        await page.press("#message", "Enter")

    async with router_rig(model_dir) as rig, live_app(rig.app) as url, browsing(url) as opened:
        page = opened.page
        await page.route("**/v1/chat/completions", never)
        await says(page, "one")
        await expect(page.locator("#stop")).to_be_enabled()
        await page.click("#clear")
        await expect(page.locator("#send")).to_be_enabled()
        await says(page, "two")
        await page.click("#stop")
        await expect(page.locator(".turn.error")).to_have_text("stopped")
        await page.unroute("**/v1/chat/completions", never)
        async with page.expect_request("**/v1/chat/completions") as waiting:
            await says(page, "three")
        asked.append(json.loads((await waiting.value).post_data or "")["messages"])

    assert asked == [[{"role": "user", "content": text}] for text in ("one", "two", "three")]


async def test_the_keyboard_stays_at_a_request_while_others_come(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig, live_app(rig.app) as url:
        first = (await rig.complete([7] * 9, max_tokens=3)).headers["x-request-id"]
        async with browsing(url) as opened:
            page = opened.page
            button = page.locator(f'#recent button[title$="{first} went"]')
            await button.focus()
            await rig.complete([8] * 9, max_tokens=3)
            await expect(page.locator("#recent li")).to_have_count(2, timeout=TIMEOUT_MS)
            await expect(button).to_be_focused()
