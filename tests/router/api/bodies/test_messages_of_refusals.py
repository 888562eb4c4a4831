"""What a refusal says: the value and the remedy, and nothing of how it was checked."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.router.router_rig import RouterRig
from tests.support.router.shared_rig import shared_rig

pytestmark = pytest.mark.asyncio(loop_scope="module")
kept, rig = shared_rig()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"logit_bias": {"x": 1}},
            "the parameter 'logit_bias' is invalid: keys must be token ids such as '50', got 'x'",
        ),
        (
            {"temperature": -1},
            "the parameter 'temperature' is invalid: Input should be greater than or equal to 0, got -1",
        ),
        ({"n": "two"}, "the parameter 'n' is invalid: Input should be a valid integer, got \"two\""),
        ({"stop": ["a", "b", 5]}, "the parameter 'stop.2' is invalid: Input should be a valid string, got 5"),
        ({"stop": 5}, "the parameter 'stop' is invalid: Input should be a valid string or a list of strings, got 5"),
        (
            {"stop": ["a", "b" * 1001]},
            f"stop has a string of 1001 characters, the limit is 1000: it begins with '{'b' * 40}'",
        ),
        (
            {"prompt": {"a": 1}},
            "the parameter 'prompt' is invalid: Input should be a valid string, a list of strings, a list of token ids "
            "or a list of such lists",
        ),
        (
            {"beam_width": 1},
            "a beam search needs at least 2 beams, but beam_width is 1: set it to 2 or more, or leave it out to "
            "generate without a beam search",
        ),
        (
            {"beam_width": 1000},
            "beam_width is 1000: the beams need 2 candidate tokens each, 2000 in all, but the model has only 400 "
            "tokens; set it to 200 or less",
        ),
    ],
)
async def test_message_has_the_value_and_nothing_of_how_it_was_checked(
    rig: RouterRig, fields: dict[str, Any], message: str
) -> None:
    response = await rig.client.post("/v1/completions", json={"prompt": "hi", **fields})

    assert response.json()["error"]["message"] == message


async def test_place_in_a_chat_is_one_that_was_sent(rig: RouterRig) -> None:
    response = await rig.chat("hi", prediction={"type": "content", "content": 7})

    assert response.json()["error"]["message"] == (
        "the parameter 'prediction.content' is invalid: Input should be a valid string or a list of parts, got 7"
    )


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [("GET", "/nothing-here", "there is no such path"), ("DELETE", "/v1/models", "this path does not support DELETE")],
)
async def test_what_meets_no_endpoint_is_told_by_method_and_path(
    rig: RouterRig, method: str, path: str, words: str
) -> None:
    response = await rig.client.request(method, path)

    assert response.json()["error"]["message"].startswith(f"{method} {path}: {words}")


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/v1/chat/completions", {"messages": [{}]}, "the parameter 'messages.0.role' is invalid: Field required"),
        (
            "/v1/responses",
            {"input": [{"type": 5}]},
            "the parameter 'input.0' is invalid: Input should be an object with one of the types function_call, "
            "function_call_output, message, reasoning",
        ),
        (
            "/v1/messages",
            {"max_tokens": 1, "messages": [{"role": "user", "content": [{"text": "hi"}]}]},
            "the parameter 'messages.0.content.0' is invalid: Input should be an object with one of the types text, "
            "thinking, redacted_thinking, tool_use, tool_result",
        ),
        (
            "/v1/messages",
            {"max_tokens": 1, "messages": [{"role": "tool", "content": "4", "tool_call_id": "c"}]},
            "the parameter 'messages.0.role' is invalid: Input should be 'user', 'assistant' or 'system', got \"tool\"",
        ),
    ],
)
async def test_the_first_of_several_wrong_places_is_told(
    rig: RouterRig, path: str, fields: dict[str, Any], message: str
) -> None:
    response = await rig.client.post(path, json=fields)

    assert response.status_code == 400
    assert response.json()["error"]["message"] == message
