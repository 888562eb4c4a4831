"""Debian's chromium, driven by playwright: the live page as a person sees it.

``python -m tests.support.router.browser`` installs it where it is missing; exit code 3, with the reason, where that
cannot be.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from playwright.async_api import Page, async_playwright, expect

from tests.support.debian_packages import CHROMIUM, install

PACKAGES = ("chromium", "fonts-dejavu-core")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
TIMEOUT_MS = 120_000
expect.set_options(timeout=TIMEOUT_MS)
CANNOT = 3


@dataclass(slots=True, eq=False)
class Browsing:
    """An open page, and its error messages."""

    page: Page
    complaints: list[str] = field(default_factory=list)


@asynccontextmanager
async def browsing(url: str) -> AsyncIterator[Browsing]:
    """The page at a URL, in a browser of its own."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS, timeout=TIMEOUT_MS)
        try:
            page = await browser.new_page()
            page.set_default_timeout(TIMEOUT_MS)
            opened = Browsing(page)
            page.on("pageerror", lambda error: opened.complaints.append(str(error)))
            page.on(
                "console",
                lambda said: opened.complaints.append(f"{said.text} {said.location}") if said.type == "error" else None,
            )
            await page.goto(url)
            yield opened
        finally:
            await browser.close()


def main() -> int:
    """Install the browser if it is missing."""
    if CHROMIUM.exists():
        return 0
    if os.geteuid() != 0:
        print("chromium is not installed, and only root can install it")
        return CANNOT
    reason = install(PACKAGES)
    if reason is not None:
        print(reason)
    return 0 if reason is None else CANNOT


if __name__ == "__main__":
    sys.exit(main())
