"""Request ids behind Serve's own servers, which repeat whatever they are given: here with Serve's middleware itself."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from ray._common.utils import import_attr
from ray.serve._private.http_util import _apply_middlewares, validate_http_proxy_callback_return
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.config.config import BatonConfig
from cluster.deploy.http_middlewares import limits_of_environment
from cluster.deploy.serve_env import proxy_environment, serve_environment
from router.api.app import build_app
from router.api.http.bounded_protocol import HttpLimits
from tests.support.router.router_rig import RouterRig, router_rig
from tests.support.router.router_tokenizer import write_model_dir


def as_served(rig: RouterRig) -> ASGIApp:
    """The application inside what Serve puts around it, in the environment that we give to Serve."""
    callback = import_attr(serve_environment()["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"])
    served: ASGIApp = _apply_middlewares(
        build_app(rig.service, answers_request_id=False), validate_http_proxy_callback_return(callback())
    )
    return served


async def answered(rig: RouterRig, path: str, given: list[bytes]) -> list[str]:
    transport = httpx.ASGITransport(as_served(rig))
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        response = await client.get(path, headers=[(b"X-Request-Id", value) for value in given])
    return response.headers.get_list("x-request-id")


@pytest.mark.parametrize("given", [[b"two words"], [b"x" * 129], [b"caf\xe9"], [b"one", b"two"], [b""], []])
@pytest.mark.parametrize("path", ["/health", "/no-such-path", "/v1/completions"])
async def test_request_id_that_breaks_the_rule_is_replaced(tmp_path: Path, path: str, given: list[bytes]) -> None:
    async with router_rig(write_model_dir(tmp_path / "model")) as rig:
        (name,) = await answered(rig, path, given)

    assert name.isalnum()
    assert name.encode() not in given


async def test_headers_that_serves_proxy_decodes_are_utf8() -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def behind(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(scope["headers"])
        await Response()(scope, receive, send)

    callback = import_attr(serve_environment()["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"])
    app = _apply_middlewares(behind, validate_http_proxy_callback_return(callback()))
    sent = [(b"x-session-id", b"caf\xe9"), (b"serve-multiplexed-model-id", b"\xff"), (b"x-other", "caf\u00e9".encode())]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        answer = await client.get("/", headers=sent)

    assert answer.status_code == 200
    told = {name: value.decode() for name, value in seen}
    assert told[b"x-session-id"] == told[b"x-other"] == "caf\u00e9"
    assert told[b"serve-multiplexed-model-id"] == "\u00ff"


def test_limits_of_headers_are_those_of_the_configuration() -> None:
    security = {"max_num_headers": 7, "max_header_bytes": 999, "header_timeout_s": 2.5, "max_connections": 8}
    settings = {"model": "m", "security": security, "router": {"write_timeout_s": 3.5, "min_read_bytes_per_s": 77.0}}
    told = proxy_environment(BatonConfig.model_validate(settings))

    assert limits_of_environment(told) == HttpLimits(
        max_num_headers=7,
        max_header_bytes=999,
        header_timeout_s=2.5,
        max_connections=8,
        write_timeout_s=3.5,
        min_read_bytes_per_s=77.0,
    )
    assert limits_of_environment({}) == HttpLimits()


async def test_request_id_that_keeps_the_rule_comes_back(tmp_path: Path) -> None:
    async with router_rig(write_model_dir(tmp_path / "model")) as rig:
        assert await answered(rig, "/health", [b"my-own-id"]) == ["my-own-id"]
