"""Pictures of the live page of a running cluster: python -m scripts.live_page --url http://127.0.0.1:8000

Needs playwright, Debian's chromium, and pillow, which comes with matplotlib. The cluster has at least two workers a
role, and one of them is killed, so it is one of this machine's. Those that are kept are of `roles: elastic`, 2 + 2
workers of 400 blocks, and `kv_transfer.allow_faults: true`.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = "/usr/bin/chromium"
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
QUESTION = "The code of the blue fox is 4827. The code of the red bear is 1356. What is the code of the blue fox?"
NUM_CLIENTS = 6
UNDER_LOAD_MS = 9000
UNTIL_KNOWN_S = 8.0
NUM_COLOURS = 128
TIMEOUT_MS = 60_000


def page_of(browser: Browser, url: str, *, scheme: str, width: int = 1280, height: int = 900) -> Page:
    """The page of a cluster, which shows its workers."""
    page = browser.new_page(
        viewport={"width": width, "height": height}, color_scheme="dark" if scheme == "dark" else "light"
    )
    page.set_default_timeout(TIMEOUT_MS)
    page.goto(url)
    page.wait_for_selector(".card.running")
    return page


def ask(page: Page) -> None:
    """Have the playground answer, and show where the time went."""
    page.fill("#message", QUESTION)
    page.press("#message", "Enter")
    page.wait_for_selector("#waterfall .span")
    page.evaluate("document.activeElement.blur()")
    page.wait_for_timeout(1500)


@contextmanager
def load(url: str) -> Iterator[None]:
    """Requests of several clients at once, as long as the block lasts."""
    is_over = threading.Event()

    def keep_asking(number: int) -> None:
        with httpx.Client(base_url=url, timeout=120.0, trust_env=False) as client:
            for turn in range(10_000):
                if is_over.is_set():
                    return
                prompt = [3 + (7 * (number + turn) + place) % 250 for place in range(160 + 31 * number)]
                body = {"prompt": prompt, "max_tokens": 220, "ignore_eos": True}
                client.post("/v1/completions", json=body)

    clients = [threading.Thread(target=keep_asking, args=(number,)) for number in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        is_over.set()
        for client in clients:
            client.join()


def keep(page: Page, file: Path, *, is_whole: bool = False) -> None:
    """A picture of the page, or of what is seen of it, in 128 colours: a third of the bytes."""
    page.screenshot(path=file, full_page=is_whole)
    with Image.open(file) as picture:
        few = picture.convert("RGB").quantize(NUM_COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.save(file, optimize=True)


def kill_a_worker(url: str) -> str:
    """End one decode worker at once; its id."""
    rows = httpx.get(f"{url}/status", timeout=10.0, trust_env=False).json()["pools"]["decode"]
    os.kill(rows[0]["pid"], signal.SIGKILL)
    return str(rows[0]["replica_id"])


def take_all(url: str, folder: Path) -> None:
    """The five pictures, the killed worker last."""
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        with load(url):  # so that workers' steps are known, and predictions can be shown
            time.sleep(UNTIL_KNOWN_S)
        for scheme in ("light", "dark"):
            page = page_of(browser, url, scheme=scheme)
            ask(page)
            keep(page, folder / f"live-{scheme}.png", is_whole=True)
            page.close()
        page = page_of(browser, url, scheme="light", width=390, height=844)
        keep(page, folder / "live-small.png")
        page.close()
        with load(url):
            page = page_of(browser, url, scheme="light")
            page.wait_for_timeout(UNDER_LOAD_MS)
            keep(page, folder / "live-load.png")
            killed = kill_a_worker(url)
            killed_at_s = time.monotonic()
            page.wait_for_selector(f'.card.left_out[data-replica="{killed}"], .card.gone[data-replica="{killed}"]')
            print(f"the page followed the killed worker after {time.monotonic() - killed_at_s:.1f} s")
            page.wait_for_timeout(1200)
            keep(page, folder / "live-killed.png")
        browser.close()


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the cluster.")
    parser.add_argument("--folder", type=Path, default=Path("docs/images"), help="Folder for the pictures.")
    asked = parser.parse_args()
    take_all(asked.url.rstrip("/"), asked.folder)


if __name__ == "__main__":
    main()
