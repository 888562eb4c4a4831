"""The page at /, which loads nothing from elsewhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from kv_transfer.fault_options import Fault
from router.api.live import FOLDER, page_files
from router.security import SecuritySettings, hash_key, new_key
from tests.support.router.router_rig import router_rig

HTML = {"Accept": "text/html,application/xhtml+xml"}


async def test_browser_gets_the_page_and_load_balancers_their_answer(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        page = await rig.client.get("/", headers=HTML)
        probe = await rig.client.get("/")

        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert probe.json() == {"status": "ok"}
        assert {page.headers["vary"], probe.headers["vary"]} == {"Accept"}


@pytest.mark.parametrize("headers", [HTML, {}])
async def test_head_of_the_page(model_dir: Path, headers: dict[str, str]) -> None:
    async with router_rig(model_dir) as rig:
        response = await rig.client.head("/", headers=headers)

        assert (response.status_code, response.content) == (200, b"")


async def test_page_and_its_files_are_open_under_keys(model_dir: Path) -> None:
    security = SecuritySettings(api_keys=(hash_key(new_key()),), admin_keys=(hash_key(new_key()),))
    async with router_rig(model_dir, security=security) as rig:
        page = (await rig.client.get("/", headers=HTML)).text
        names = re.findall(r'(?:href|src)="(live/[^"]+)"', page)

        assert {"live/main.js", "live/page.css"} <= set(names)
        for name in names:
            response = await rig.client.get(f"/{name}")
            assert response.status_code == 200
            assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", ["nothing.js", "..%2Ffeed.py", "%2e%2e/feed.py"])
async def test_other_files_are_not_served(model_dir: Path, name: str) -> None:
    async with router_rig(model_dir) as rig:
        assert (await rig.client.get(f"/live/{name}")).status_code == 404


def test_modules_import_only_each_other() -> None:
    for file in FOLDER.glob("*.js"):
        for name in re.findall(r'from "([^"]+)"', file.read_text()):
            assert name.removeprefix("./") in page_files(), f"{file.name} imports {name}"


def test_nothing_comes_from_outside_and_no_text_becomes_html() -> None:
    for file in FOLDER.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|@import|innerHTML|insertAdjacentHTML|eval\(", text), file.name
        assert len(text.splitlines()) <= 400, file.name


def test_faults_of_the_page_are_those_that_there_are() -> None:
    listed = re.findall(r"^  (\w+): \"", (FOLDER / "faults.js").read_text(), re.MULTILINE)

    assert listed == [fault.value for fault in Fault]


def test_files_are_part_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())

    assert "live/static/*" in project["tool"]["setuptools"]["package-data"]["router"]
