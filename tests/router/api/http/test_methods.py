"""What probes and browsers send: other paths of the health check, HEAD, OPTIONS."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import httpx
import pytest

from kv_transfer.params import PROTOCOL_VERSION
from router.security import SecuritySettings, hash_key, new_key
from tests.support.router.live_app import live_app
from tests.support.router.router_rig import router_rig

HEALTH = ["/", "/health", "/healthz", "/ping", "/v1/health"]
READABLE = [
    *HEALTH,
    "/ready",
    "/version",
    "/v1/models",
    "/v1/models/tiny",
    "/load",
    "/metrics",
    "/openapi.json",
    "/docs",
]


@pytest.mark.parametrize("path", HEALTH)
async def test_every_probe_finds_its_health_check(model_dir: Path, path: str) -> None:
    async with router_rig(model_dir, num_decode=0) as rig:
        answer = await rig.client.get(path)

        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize("path", [*READABLE, "/v1/models/other", "/nothing-here"])
async def test_head_is_get_without_the_body(model_dir: Path, path: str) -> None:
    async with (
        router_rig(model_dir) as rig,
        live_app(rig.app) as url,
        httpx.AsyncClient(base_url=url, timeout=60.0) as client,
    ):
        got, asked = await client.get(path), await client.head(path)

        changing = ("x-request-id", "date", *(("content-length",) if path == "/metrics" else ()))
        headers = [{key: text for key, text in item.headers.items() if key not in changing} for item in (got, asked)]
        assert (asked.status_code, headers[1], asked.content) == (got.status_code, headers[0], b"")
        assert got.content


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/health", "GET, HEAD, OPTIONS"),
        ("/", "GET, HEAD, OPTIONS"),
        ("/v1/models/tiny", "GET, HEAD, OPTIONS"),
        ("/docs", "GET, HEAD, OPTIONS"),
        ("/v1/chat/completions", "OPTIONS, POST"),
        ("/admin/drain", "OPTIONS, POST"),
    ],
)
async def test_options_names_the_methods_of_a_path(model_dir: Path, path: str, methods: str) -> None:
    async with router_rig(model_dir) as rig:
        asked, refused = await rig.client.options(path), await rig.client.request("PATCH", path)

        assert (asked.status_code, asked.headers["allow"], asked.content) == (204, methods, b"")
        assert (refused.status_code, refused.headers["allow"]) == (405, methods)


async def test_head_where_nothing_can_be_read_is_refused(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        answer = await rig.client.head("/v1/completions")

        assert (answer.status_code, answer.headers["allow"]) == (405, "OPTIONS, POST")
        assert (await rig.client.options("/nothing-here")).status_code == 404


async def test_keys_are_asked_for_by_whatever_method(model_dir: Path) -> None:
    key = new_key()
    async with router_rig(model_dir, security=SecuritySettings(api_keys=(hash_key(key),))) as rig:
        for method in ("HEAD", "OPTIONS"):
            assert (await rig.client.request(method, "/v1/models")).status_code == 401
            assert (await rig.client.request(method, "/healthz")).status_code in (200, 204)
        assert (await rig.client.head("/v1/models", headers={"Authorization": f"Bearer {key}"})).status_code == 200


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
async def test_browsers_of_a_configured_origin_may_ask_by_every_method(model_dir: Path, method: str) -> None:
    origin = "https://chat.example.org"
    async with router_rig(model_dir, security=SecuritySettings(cors_allow_origins=(origin,))) as rig:
        headers = {"Origin": origin, "Access-Control-Request-Method": method}
        preflight = await rig.client.options("/v1/models", headers=headers)
        plain = await rig.client.options("/v1/models", headers={"Origin": origin})

        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, origin)
        assert (plain.status_code, plain.headers["allow"]) == (204, "GET, HEAD, OPTIONS")


async def test_version_says_which_baton_and_which_protocol(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        answer = (await rig.client.get("/version")).json()

        assert answer == {"version": version("baton-serve"), "protocol_version": PROTOCOL_VERSION}


async def test_methods_are_counted_as_they_came(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        await rig.client.head("/healthz")
        text = (await rig.client.get("/metrics")).text

        (line,) = [line for line in text.splitlines() if 'path="/healthz"' in line and not line.startswith("#")]
        assert 'method="HEAD"' in line
        assert line.endswith(" 1.0")
