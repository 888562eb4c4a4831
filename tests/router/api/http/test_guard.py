"""Who gets in, and how much may be sent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from router.security import SecuritySettings, hash_key, new_key
from tests.support.router.router_rig import RouterRig, router_rig

USER, ADMIN = new_key(), new_key()
KEYS = SecuritySettings(api_keys=(hash_key(new_key()), hash_key(USER)), admin_keys=(hash_key(ADMIN),))


@pytest.fixture
async def rig(model_dir: Path) -> AsyncIterator[RouterRig]:
    async with router_rig(model_dir, security=KEYS) as rig:
        yield rig


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def status_of(rig: RouterRig, path: str, key: str | None) -> int:
    return (await rig.client.get(path, headers=bearer(key) if key else {})).status_code


OPEN = {"/", "/health", "/healthz", "/v1/health", "/ping", "/ready"}


@pytest.mark.parametrize("path", sorted(OPEN))
async def test_health_needs_no_key(rig: RouterRig, path: str) -> None:
    assert await status_of(rig, path, None) == 200


async def test_every_other_path_needs_a_key(rig: RouterRig) -> None:
    paths = {route.path for route in rig.app.routes if hasattr(route, "path")} - OPEN - {"/live/{name}"}
    assert {"/v1/models", "/openapi.json", "/docs", "/version", "/load", "/metrics", "/status"} <= paths

    for path in (*paths, "/v1/models/", "//v1/models", "/nothing-here", "/health/"):
        assert [await status_of(rig, path, key) for key in (None, "wrong", USER + "x")] == [401] * 3, path


async def test_refusal_has_the_shape_that_clients_read(rig: RouterRig) -> None:
    response = await rig.client.get("/v1/models", headers=bearer("wrong"))

    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"
    client = openai.AsyncOpenAI(api_key="wrong", base_url="http://router/v1", http_client=rig.client)
    with pytest.raises(openai.AuthenticationError, match="the API key is unknown"):
        await client.models.list()


async def test_openai_client_with_its_key_is_served(rig: RouterRig) -> None:
    client = openai.AsyncOpenAI(api_key=USER, base_url="http://router/v1", http_client=rig.client)

    answer = await client.completions.create(model="tiny", prompt="hi", max_tokens=2)

    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


@pytest.mark.parametrize(
    "path", ["/status", "/metrics", "/admin/drain", "/admin/nothing-here", "/reset_prefix_cache", "/server_info"]
)
async def test_operations_need_an_admin_key(rig: RouterRig, path: str) -> None:
    response = await rig.client.get(path, headers=bearer(USER))

    assert (response.status_code, response.json()["error"]["code"]) == (403, "admin_key_required")
    assert await status_of(rig, path, ADMIN) in (200, 404, 405)


async def test_admin_key_opens_what_a_users_key_opens(rig: RouterRig) -> None:
    assert await status_of(rig, "/v1/models", ADMIN) == 200


async def test_without_admin_keys_the_operations_are_closed(model_dir: Path) -> None:
    async with router_rig(model_dir, security=SecuritySettings(api_keys=(hash_key(USER),))) as rig:
        response = await rig.client.get("/status", headers=bearer(USER))

        assert response.status_code == 403
        assert "security.admin_keys" in response.json()["error"]["message"]


async def test_admin_keys_alone_leave_the_rest_open(model_dir: Path) -> None:
    async with router_rig(model_dir, security=SecuritySettings(admin_keys=(hash_key(ADMIN),))) as rig:
        assert [await status_of(rig, "/v1/models", None), await status_of(rig, "/status", None)] == [200, 401]


async def test_clusters_own_key_is_asked_for_by_orders_alone(model_dir: Path) -> None:
    async with router_rig(model_dir, security=SecuritySettings(own_admin_key=hash_key(ADMIN))) as rig:
        assert [await status_of(rig, path, None) for path in ("/v1/models", "/status", "/metrics")] == [200] * 3
        assert [await status_of(rig, "/admin/drain", key) for key in (None, USER, ADMIN)] == [401, 401, 405]


async def test_clusters_own_key_opens_what_api_keys_close(model_dir: Path) -> None:
    settings = SecuritySettings(api_keys=(hash_key(USER),), own_admin_key=hash_key(ADMIN))
    async with router_rig(model_dir, security=settings) as rig:
        assert [await status_of(rig, "/status", key) for key in (None, USER, ADMIN)] == [401, 403, 200]


@pytest.mark.parametrize(
    ("key", "words"),
    [(None, "no API key was sent"), (USER, "a user's: send one in the header")],
    ids=["no key", "a user's"],  # keys are drawn: processes that share the tests must call them the same
)
async def test_who_lacks_the_admin_key_is_told_where_it_is(model_dir: Path, key: str | None, words: str) -> None:
    settings = SecuritySettings(api_keys=(hash_key(USER),), own_admin_key=hash_key(ADMIN))
    async with router_rig(model_dir, security=settings) as rig:
        response = await rig.client.get("/server_info", headers=bearer(key) if key else {})

    message = response.json()["error"]["message"]
    assert words in message
    assert "/server_info needs" in message
    assert "~/.baton/admin-keys" in message


async def test_metrics_can_be_opened(model_dir: Path) -> None:
    settings = SecuritySettings(api_keys=(hash_key(USER),), open_metrics=True)
    async with router_rig(model_dir, security=settings) as rig:
        assert [await status_of(rig, "/metrics", None), await status_of(rig, "/status", None)] == [200, 401]


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer ", "Basic {key}", "{key}", "Bearer {key} more"])
async def test_other_authorization_is_refused(rig: RouterRig, value: str) -> None:
    headers = {"Authorization": value.format(key=USER)}

    assert (await rig.client.get("/v1/models", headers=headers)).status_code == 401


async def test_two_keys_in_one_request_are_refused(rig: RouterRig) -> None:
    headers = [("Authorization", "Bearer wrong"), ("Authorization", f"Bearer {USER}")]

    assert (await rig.client.get("/v1/models", headers=headers)).status_code == 401


async def test_without_keys_any_key_is_as_good_as_none(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        assert [await status_of(rig, "/status", key) for key in (None, "whatever")] == [200, 200]


@pytest.mark.parametrize(
    "headers", [{f"X-{number}": "a" for number in range(200)}, {"X-Long": "a" * 40_000}], ids=("many", "long")
)
async def test_too_many_or_too_long_headers_are_refused(rig: RouterRig, headers: dict[str, str]) -> None:
    response = await rig.client.get("/health", headers=headers)

    assert (response.status_code, response.json()["error"]["code"]) == (431, "headers_too_large")


async def test_too_long_url_is_refused(rig: RouterRig) -> None:
    assert (await rig.client.get("/health?" + "a" * 40_000)).status_code == 431


ORIGIN = "https://chat.example.org"
ASKING = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


async def test_web_pages_are_not_let_in_by_default(rig: RouterRig) -> None:
    asked = await rig.client.options("/v1/completions", headers=ASKING)
    answer = await rig.client.get("/v1/models", headers={**bearer(USER), "Origin": ORIGIN})

    assert asked.status_code == 401
    assert not any(name.startswith("access-control") for name in (*asked.headers, *answer.headers))


async def test_web_pages_of_a_configured_origin_are_let_in(model_dir: Path) -> None:
    settings = SecuritySettings(api_keys=KEYS.api_keys, cors_allow_origins=(ORIGIN,))
    async with router_rig(model_dir, security=settings) as rig:
        asked = await rig.client.options("/v1/completions", headers=ASKING)
        refused = await rig.client.get("/v1/models", headers={"Origin": ORIGIN})
        stranger = await rig.client.get("/v1/models", headers={**bearer(USER), "Origin": "https://other.example"})

    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)
    assert "access-control-allow-origin" not in stranger.headers
