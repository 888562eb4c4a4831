"""The OpenAPI document: what it promises is what routes and errors can do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from router.api.bodies.chat_body import ChatBody
from router.api.bodies.completion_body import CompletionBody
from router.api.bodies.strict_body import StrictBody
from router.api.errors import _STATUS
from router.api.messages.body import MessagesBody
from router.api.responses.body import ResponsesBody
from router.errors import (
    AdminClosedError,
    AdminKeyError,
    HostNotAllowedError,
    InvalidApiKeyError,
    OriginNotAllowedError,
)
from router.security import SecuritySettings, hash_key, new_key
from tests.support.router.router_rig import router_rig

BODIES = (ChatBody, CompletionBody, ResponsesBody, MessagesBody)
GENERATION = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


async def document(model_dir: Path, security: SecuritySettings | None = None) -> dict[str, Any]:
    async with router_rig(model_dir, security=security) as rig:
        found: dict[str, Any] = rig.app.openapi()
        return found


async def test_every_route_says_what_it_answers(model_dir: Path) -> None:
    paths = (await document(model_dir))["paths"]

    assert len(paths) == 32
    for path, operations in paths.items():
        for operation in operations.values():
            assert {"200", "431"} <= operation["responses"].keys(), path
            assert "422" not in operation["responses"], path
            content = operation["responses"]["200"]["content"]
            assert all(item["schema"].get("type") in ("object", "string") for item in content.values()), path


@pytest.mark.parametrize("path", GENERATION)
async def test_every_error_that_a_generation_can_end_with_is_promised(model_dir: Path, path: str) -> None:
    keys = SecuritySettings(api_keys=(hash_key(new_key()),))
    promised = (await document(model_dir, keys))["paths"][path]["post"]["responses"].keys()

    elsewhere = (AdminKeyError, AdminClosedError, HostNotAllowedError, OriginNotAllowedError)
    possible = {str(int(status)) for error, status, _ in _STATUS if error not in elsewhere}
    assert possible <= promised


async def test_keys_are_asked_for_where_they_are_needed(model_dir: Path) -> None:
    open_paths = (await document(model_dir))["paths"]
    paths = (await document(model_dir, SecuritySettings(api_keys=(hash_key(new_key()),))))["paths"]

    assert not any("security" in item for operations in open_paths.values() for item in operations.values())
    closed = {path for path, operations in paths.items() if "security" in next(iter(operations.values()))}
    assert set(paths) - closed == {"/", "/health", "/healthz", "/v1/health", "/ping", "/ready"}
    assert "403" in paths["/status"]["get"]["responses"]
    assert (InvalidApiKeyError, 401) in [(error, int(status)) for error, status, _ in _STATUS]


async def test_refusal_of_a_name_is_promised_where_names_matter(model_dir: Path) -> None:
    paths = (await document(model_dir, SecuritySettings(is_loopback=True)))["paths"]

    assert all("403" in item["responses"] for operations in paths.values() for item in operations.values())
    assert not any("security" in item for operations in paths.values() for item in operations.values())


@pytest.mark.parametrize(("path", "model"), list(zip(GENERATION, BODIES, strict=True)))
async def test_bodies_name_every_parameter_and_allow_others_only_as_null(
    model_dir: Path, path: str, model: type[StrictBody]
) -> None:
    request = (await document(model_dir))["paths"][path]["post"]["requestBody"]
    schema = request["content"]["application/json"]["schema"]

    assert schema["properties"].keys() == {*model.model_fields, *model.neutral_values}
    assert schema["additionalProperties"] == {"type": "null"}
    assert "$ref" not in str(schema)


async def test_document_tells_what_a_deletion_answers(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        made = await rig.client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 1})
        deleted = await rig.client.delete(f"/v1/responses/{made.json()['id']}")
        operation = rig.app.openapi()["paths"]["/v1/responses/{response_id}"]["delete"]

    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    assert schema["properties"].keys() == deleted.json().keys()


@pytest.mark.parametrize(
    "content", [{}, {"content": None}, {"content": "hi"}, {"content": [{"type": "text", "text": "a"}]}]
)
async def test_document_allows_messages_without_content(model_dir: Path, content: dict[str, Any]) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    body = {"messages": [{"role": "assistant", "tool_calls": [call], **content}]}
    request = (await document(model_dir))["paths"]["/v1/chat/completions"]["post"]["requestBody"]

    jsonschema.validate(body, request["content"]["application/json"]["schema"])
