"""Edits of the conversation that clients order with each request: taken where they leave all as it is."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest

from tests.support.router.live_app import live_app
from tests.support.router.router_rig import RouterRig
from tests.support.router.shared_rig import shared_rig

PATHS = ("/v1/messages", "/v1/messages/count_tokens")
THINKING = "clear_thinking_20251015"


pytestmark = pytest.mark.asyncio(loop_scope="module")
kept, rig = shared_rig()


async def post(rig: RouterRig, path: str, management: Any) -> httpx.Response:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "context_management": management}
    return await rig.client.post(path, json=body | ({} if path.endswith("count_tokens") else {"max_tokens": 2}))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "management",
    [
        {},
        {"edits": None},
        {"edits": []},
        {"edits": [{"type": THINKING, "keep": "all"}]},
        {"edits": [{"type": THINKING, "keep": {"type": "all"}}]},
    ],
)
async def test_edits_that_remove_nothing_are_taken_and_told(rig: RouterRig, path: str, management: Any) -> None:
    answer = await post(rig, path, management)

    assert answer.status_code == 200, answer.text
    assert answer.headers["x-baton-ignored"] == "context_management"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("management", "words"),
    [
        (
            {"edits": [{"type": THINKING, "keep": "all"}, {"type": THINKING}]},
            f"'context_management.edits.1' ({THINKING}) is not supported: it would remove reasoning of earlier turns",
        ),
        ({"edits": [{"type": THINKING}]}, "send 'keep': 'all'"),
        ({"edits": [{"type": THINKING, "keep": None}]}, "send 'keep': 'all'"),
        ({"edits": [{"type": THINKING, "keep": {"type": "thinking_turns", "value": 2}}]}, "edits.0"),
        ({"edits": [{"type": "clear_tool_uses_20250919"}]}, "'context_management.edits.0' (clear_tool_uses_20250919)"),
        ({"edits": [{"type": "compact_20260112", "trigger": {}}]}, "leave the edit out"),
        ({"edits": [{"keep": "all"}]}, "context_management"),
        ({"edits": [{"type": THINKING, "keep": "some"}]}, "edits.0"),
        ({"edits": [{"type": THINKING, "keep": "all", "other": 1}]}, "edits.0.other"),
        ({"edits": {}}, "edits"),
        ([], "context_management"),
    ],
)
async def test_edits_that_would_remove_something_are_refused(
    rig: RouterRig, path: str, management: Any, words: str
) -> None:
    answer = await post(rig, path, management)

    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


async def test_the_official_client_sends_such_edits(rig: RouterRig) -> None:
    edits: Any = {"edits": [{"type": THINKING, "keep": "all"}]}
    messages: Any = [{"role": "user", "content": "hi"}]
    async with (
        live_app(rig.app) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        answer = await client.beta.messages.create(
            model="tiny", max_tokens=2, messages=messages, context_management=edits
        )

    assert answer.usage.output_tokens == 2
