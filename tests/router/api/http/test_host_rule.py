"""Which names the API answers to, and which web pages may call it, where no key protects it."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from router.host_rule import is_loopback_name
from router.security import SecurityError, SecuritySettings, hash_key, new_key
from tests.support.router.live_app import live_app
from tests.support.router.router_rig import RouterRig, router_rig

KEY = new_key()
HERE = SecuritySettings(is_loopback=True)
NAMED = dataclasses.replace(HERE, allowed_hosts=("Baton.example.org", "10.0.0.5", "[fd00::5]"))
LOOPBACK = [
    "localhost",
    "LOCALHOST:9000",
    "localhost.",
    "127.0.0.1",
    "127.0.0.1:8000",
    "127.8.9.1",
    "[::1]:8000",
    "[::1]",
]
FOREIGN = [
    *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "0.0.0.0:8000"),
    *(
        "notlocalhost",
        "10.0.0.5",
        "[fd00::5]:8000",
        "[::1",
        "::1:8000",
        "evil.example@localhost",
        "evil, localhost",
        ":1",
    ),
]


@pytest.fixture
async def rig(model_dir: Path) -> AsyncIterator[RouterRig]:
    async with router_rig(model_dir, security=HERE) as rig:
        yield rig


@pytest.mark.parametrize("host", LOOPBACK)
async def test_names_of_the_own_machine_are_answered_on_any_port(rig: RouterRig, host: str) -> None:
    answer = await rig.client.get("/v1/models", headers={"Host": host})

    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("host", FOREIGN)
async def test_other_names_are_refused_with_the_name_and_the_remedy(rig: RouterRig, host: str) -> None:
    answer = await rig.client.get("/v1/models", headers={"Host": host})

    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")
    assert all(text in answer.json()["error"]["message"] for text in (host, "security.allowed_hosts", "api_keys"))


async def test_no_route_answers_to_other_names(rig: RouterRig) -> None:
    paths = {route.path for route in rig.app.routes if hasattr(route, "path")}
    assert {"/v1/models", "/docs", "/openapi.json", "/status", "/metrics", "/admin/drain", "/health"} <= paths

    for path in (*paths, "/nothing-here", "//v1/models"):
        for method in ("GET", "POST", "HEAD", "OPTIONS"):
            answer = await rig.client.request(method, path, headers={"Host": "evil.example"})
            assert answer.status_code == 403, (method, path)


async def test_each_of_several_host_headers_must_be_allowed(rig: RouterRig) -> None:
    headers = [("Host", "localhost"), ("Host", "evil.example")]

    assert (await rig.client.get("/v1/models", headers=headers)).status_code == 403


async def test_old_client_that_names_no_host_is_answered(rig: RouterRig) -> None:
    request = rig.client.build_request("GET", "/v1/models")
    del request.headers["Host"]

    assert (await rig.client.send(request)).status_code == 200


@pytest.mark.parametrize(
    "host", ["baton.example.org", "BATON.example.org:80", "10.0.0.5:8000", "[fd00::5]", "localhost"]
)
async def test_configured_names_are_answered_too(model_dir: Path, host: str) -> None:
    async with router_rig(model_dir, security=NAMED) as rig:
        assert (await rig.client.get("/v1/models", headers={"Host": host})).status_code == 200
        assert (await rig.client.get("/v1/models", headers={"Host": "evil.example"})).status_code == 403


@pytest.mark.parametrize(
    ("security", "is_checked"),
    [
        (SecuritySettings(), False),
        (HERE, True),
        (dataclasses.replace(HERE, allowed_hosts=("*",)), False),
        (dataclasses.replace(HERE, api_keys=(hash_key(KEY),)), False),
        (dataclasses.replace(HERE, admin_keys=(hash_key(KEY),)), True),
        (dataclasses.replace(HERE, own_admin_key=hash_key(KEY)), True),
        (dataclasses.replace(NAMED, is_loopback=False), True),
        (dataclasses.replace(NAMED, api_keys=(hash_key(KEY),)), True),
    ],
    ids=["network", "loopback", "any", "keys", "admin keys", "own admin key", "network, named", "keys, named"],
)
async def test_names_matter_where_no_key_protects_or_some_are_configured(
    model_dir: Path, security: SecuritySettings, is_checked: bool
) -> None:
    headers = {"Host": "evil.example", "Authorization": f"Bearer {KEY}"}
    async with router_rig(model_dir, security=security) as rig:
        answer = await rig.client.get("/v1/models", headers=headers)

    assert answer.status_code == (403 if is_checked else 200)


@pytest.mark.parametrize("origin", ["http://127.0.0.1:8000", "https://127.0.0.1:8000"])
async def test_own_pages_may_call(rig: RouterRig, origin: str) -> None:
    answer = await rig.client.get("/v1/models", headers={"Host": "127.0.0.1:8000", "Origin": origin})

    assert answer.status_code == 200


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "http://localhost:3000", "http://127.0.0.1", "null", "", "http://[", "file://", "a" * 500],
)
async def test_pages_of_other_sites_may_not(rig: RouterRig, origin: str) -> None:
    answer = await rig.client.post(
        "/v1/completions", json={"prompt": "hi"}, headers={"Host": "127.0.0.1:8000", "Origin": origin}
    )

    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert all(text in answer.json()["error"]["message"] for text in (origin[:80], "security.cors_allow_origins"))


@pytest.mark.parametrize(
    "origin", ["https://chat.example.org", "chrome-extension://abcdef", "https://baton.example.org"]
)
async def test_pages_that_are_configured_may(model_dir: Path, origin: str) -> None:
    security = dataclasses.replace(NAMED, cors_allow_origins=("https://chat.example.org", "chrome-extension://abcdef"))
    async with router_rig(model_dir, security=security) as rig:
        answer = await rig.client.get("/v1/models", headers={"Host": "localhost", "Origin": origin})

    assert answer.status_code == 200


@pytest.mark.parametrize("name", ["", "http://a.example", "a.example:80", "a/b", "a b", "[::1]:80", "*.example"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(SecurityError, match=r"security\.allowed_hosts"):
        SecuritySettings(allowed_hosts=(name,))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, True) for name in ("localhost", "127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1", "ip6-localhost")),
        *((name, False) for name in ("0.0.0.0", "::", "10.0.0.5", "::ffff:10.0.0.5", "example.org", "")),
    ],
)
def test_names_that_mean_this_machine(name: str, expected: bool) -> None:
    assert is_loopback_name(name) is expected


async def test_newcomers_own_requests_come_through_on_a_real_socket(rig: RouterRig) -> None:
    async with live_app(rig.app) as url, httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False) as client:
        answers = [await client.get("/v1/models", headers=headers) for headers in ({}, {"Host": "evil.example"})]

    assert [answer.status_code for answer in answers] == [200, 403]
