"""What real clients send though it has no effect here: taken, and named in a header of the answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from router.api.bodies.chat_body import ReadFields
from tests.support.router.router_rig import RouterRig, events, router_rig
from tests.support.router.router_tokenizer import CHAT_TEMPLATE, write_model_dir
from tests.support.router.shared_rig import shared_rig

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = {"role": "user", "content": "hi"}
THOUGHTFUL_TEMPLATE = (
    "{{ reasoning_effort }}/{{ verbosity }}|{% for message in messages %}"
    "{{ message.role }}({{ message.name }}<{{ message.reasoning_content }}>{{ message['content'] }})"
    "{% endfor %}"
)


pytestmark = pytest.mark.asyncio(loop_scope="module")
kept, rig = shared_rig()


@pytest_asyncio.fixture(loop_scope="module")
async def thoughtful(tmp_path: Path) -> AsyncIterator[RouterRig]:
    """A model whose template reads the reasoning and the names of messages, and the reasoning effort."""
    async with router_rig(write_model_dir(tmp_path, config={"chat_template": THOUGHTFUL_TEMPLATE})) as rig:
        yield rig


async def ignored_of(rig: RouterRig, path: str, body: dict[str, Any]) -> set[str]:
    """The names in the header of an answer that must be there."""
    response = await rig.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return set(filter(None, response.headers.get("x-baton-ignored", "").split(", ")))


def prompt_of(rig: RouterRig) -> str:
    return rig.service.tokenizer.decode(rig.prefill[0].seen[-1].prompt_token_ids, skip_special_tokens=False)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "fields",
    [
        {"store": True},
        {"service_tier": "flex"},
        {"safety_identifier": "user-1"},
        {"prompt_cache_key": "conversation-1"},
        {"prompt_cache_retention": "24h"},
        {"metadata": {"a": "b"}},
        {"user": "me"},
        {"truncation_side": "right"},
        {"no_such_thing": None},
    ],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.parametrize("stream", [False, True])
async def test_parameter_without_effect_is_taken_and_named(
    rig: RouterRig, path: str, fields: dict[str, Any], stream: bool
) -> None:
    base: dict[str, Any] = {"messages": [USER]} if path == CHAT else {"prompt": "hi"}

    assert await ignored_of(rig, path, {**base, "max_tokens": 2, "stream": stream, **fields}) == set(fields)


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"reasoning_content": "think"}, {"messages.reasoning_content"}),
        ({"reasoning": "think"}, {"messages.reasoning"}),
        ({"cache_control": {"type": "ephemeral"}}, {"messages.cache_control"}),
        ({"annotations": [{"type": "url_citation"}]}, {"messages.annotations"}),
        ({"audio": {"id": "audio_1"}}, {"messages.audio"}),
        ({"provider_specific_fields": {"refusal": None}}, {"messages.provider_specific_fields"}),
        ({"provider_specific_fields": {}}, set()),
        ({"name": "Ann"}, {"messages.name"}),
        ({"other": None}, {"messages.other"}),
        ({"annotations": [], "audio": None, "function_call": None, "tool_calls": [], "refusal": None}, set()),
        ({"reasoning_content": None, "reasoning": None, "cache_control": None}, set()),
    ],
)
async def test_field_of_a_message_without_effect_is_taken_and_named(
    rig: RouterRig, path: str, fields: dict[str, Any], expected: set[str]
) -> None:
    messages = [USER, {"role": "assistant", "content": "hello", **fields}, USER]

    assert await ignored_of(rig, path, {"messages": messages}) == expected


async def test_field_of_a_part_without_effect_is_taken_and_named(rig: RouterRig) -> None:
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "other": None}
    body = {"messages": [{"role": "user", "content": [part, part]}], "max_tokens": 1}

    assert await ignored_of(rig, CHAT, body) == {"messages.content.cache_control", "messages.content.other"}
    assert "[user] hi\nhi" in prompt_of(rig)


async def test_names_that_no_header_can_hold_are_encoded_and_few_are_told(rig: RouterRig) -> None:
    odd = {"a b": None, "x\r\nSet-Cookie: y": None, "größe": None}
    many = {f"x{number:03d}": None for number in range(200)}

    assert await ignored_of(rig, TEXT, {"prompt": "hi", "max_tokens": 1, **odd}) == {
        "a%20b",
        "x%0D%0ASet-Cookie%3A%20y",
        "gr%C3%B6%C3%9Fe",
    }
    told = await ignored_of(rig, TEXT, {"prompt": "hi", "max_tokens": 1, **many})
    assert len(told) == 33
    assert "168 more" in told
    assert await ignored_of(rig, TEXT, {"prompt": "hi", "max_tokens": 1, "y" * 3000: None}) == {"y" * 64 + "..."}


async def test_unknown_null_is_named_where_text_is_asked_for_and_refused_in_orders(rig: RouterRig) -> None:
    assert await ignored_of(rig, "/tokenize", {"prompt": "hi", "other": None}) == {"other"}
    assert await ignored_of(rig, "/detokenize", {"tokens": [5], "other": None}) == {"other"}
    response = await rig.client.post("/admin/drain", json={"replica": "prefill-0", "other": None})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "unknown parameter 'other'"


@pytest.mark.parametrize("name", ["reasoning_effort", "verbosity"])
async def test_how_much_to_say_goes_to_the_template_that_reads_it(
    rig: RouterRig, thoughtful: RouterRig, name: str
) -> None:
    body = {"messages": [USER], "max_tokens": 1, name: "low"}

    assert await ignored_of(rig, CHAT, body) == {name}
    assert await ignored_of(thoughtful, CHAT, body) == set()
    assert prompt_of(thoughtful).split("|")[0] == ("low/" if name == "reasoning_effort" else "/low")


async def test_argument_of_the_template_that_it_does_not_read_is_named(rig: RouterRig, thoughtful: RouterRig) -> None:
    kwargs = {"verbosity": "high", "enable_thinking": False}
    body = {"messages": [USER], "max_tokens": 1, "chat_template_kwargs": kwargs}

    assert await ignored_of(rig, CHAT, body) == {f"chat_template_kwargs.{name}" for name in kwargs}
    assert await ignored_of(thoughtful, CHAT, body) == {"chat_template_kwargs.enable_thinking"}
    assert prompt_of(thoughtful).startswith("/high|")


async def test_one_effort_given_twice_must_be_the_same(thoughtful: RouterRig) -> None:
    body = {"messages": [USER], "max_tokens": 1, "chat_template_kwargs": {"reasoning_effort": "low"}}

    assert await ignored_of(thoughtful, CHAT, {**body, "reasoning_effort": "low"}) == set()
    response = await thoughtful.client.post(CHAT, json={**body, "reasoning_effort": "high"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "reasoning_effort"


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_reasoning_goes_to_the_template_that_reads_it(thoughtful: RouterRig, field: str) -> None:
    messages = [USER, {"role": "assistant", "content": "yes", "name": "Ann", field: "because"}]

    assert await ignored_of(thoughtful, CHAT, {"messages": messages, "max_tokens": 1}) == set()
    assert "assistant(Ann<because>yes)" in prompt_of(thoughtful)


@pytest.mark.parametrize(
    ("look", "expected"),
    [
        (lambda fields: fields["name"], {"name"}),
        (lambda fields: fields.get("name"), {"name"}),
        (lambda fields: list(fields.items()), {"name", "role"}),
        (lambda fields: {**fields}, {"name", "role"}),
        (json.dumps, {"name", "role"}),
        (str, {"name", "role"}),
        (lambda fields: ([*fields], list(fields.values()), len(fields), "name" in fields), set()),
    ],
)
async def test_what_is_read_of_a_message_is_noted(look: Callable[[ReadFields], object], expected: set[str]) -> None:
    read: set[str] = set()
    look(ReadFields({"name": "Ann", "role": "user"}, read=read))

    assert read == expected


@pytest.mark.parametrize("message", [{"role": "assistant", "content": None}, {"role": "assistant"}])
async def test_assistant_may_have_said_nothing(rig: RouterRig, message: dict[str, Any]) -> None:
    assert await ignored_of(rig, CHAT, {"messages": [USER, message, USER], "max_tokens": 1}) == set()
    assert "[assistant] <|end|>" in prompt_of(rig)


@pytest.mark.parametrize("role", ["user", "system"])
async def test_others_must_say_something(rig: RouterRig, role: str) -> None:
    response = await rig.client.post(CHAT, json={"messages": [{"role": role, "content": None}]})

    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages")
    assert "'messages.0.content' is invalid" in error["message"]


async def test_spoken_answer_without_its_text_is_refused(rig: RouterRig) -> None:
    message = {"role": "assistant", "content": None, "audio": {"id": "audio_1"}}
    response = await rig.client.post(CHAT, json={"messages": [USER, message, USER]})

    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages.1.audio")


async def test_template_decides_on_roles(rig: RouterRig, thoughtful: RouterRig) -> None:
    messages = [{"role": "critic", "content": "weak"}, USER]
    refused = await rig.client.post(CHAT, json={"messages": messages})

    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "chat_template")
    assert "unknown role critic" in refused.json()["error"]["message"]
    assert await ignored_of(thoughtful, CHAT, {"messages": messages, "max_tokens": 1}) == set()
    assert "critic(<>weak)" in prompt_of(thoughtful)


async def test_template_that_knows_developers_gets_them(tmp_path: Path) -> None:
    knows = CHAT_TEMPLATE.replace("['system',", "['system', 'developer',")
    async with router_rig(write_model_dir(tmp_path, config={"chat_template": knows})) as rig:
        await rig.client.post(CHAT, json={"messages": [{"role": "developer", "content": "x"}, USER], "max_tokens": 1})

        assert "[developer] x" in prompt_of(rig)


@pytest.mark.parametrize("body", [{"messages": [USER]}, {"prompt": "hi"}])
async def test_request_id_names_the_request(rig: RouterRig, body: dict[str, Any]) -> None:
    path = CHAT if "messages" in body else TEXT
    response = await rig.client.post(path, json={**body, "max_tokens": 1, "request_id": "mine-1"})
    chunks = events(await rig.client.post(path, json={**body, "max_tokens": 1, "request_id": "mine-2", "stream": True}))

    assert "x-baton-ignored" not in response.headers
    assert response.headers["x-request-id"] == "mine-1"
    assert response.json()["id"].endswith("cmpl-mine-1")
    assert all(chunk["id"].endswith("cmpl-mine-2") for chunk in chunks)


async def test_same_request_id_twice_at_once_is_two_requests(rig: RouterRig) -> None:
    bodies = [{"prompt": "hi", "max_tokens": 3, "n": 2, "request_id": "same"} for _ in range(2)]
    answers = [await rig.client.post(TEXT, json=body) for body in bodies]

    assert [answer.status_code for answer in answers] == [200, 200]
    names = [request.request_id for request in rig.prefill[0].seen]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("request_id", ["", "a b", "x" * 129, "größe", "a\nb"])
async def test_request_id_that_cannot_be_used_is_refused(rig: RouterRig, request_id: str) -> None:
    response = await rig.client.post(TEXT, json={"prompt": "hi", "request_id": request_id})

    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "request_id")
    assert "1 to 128 visible ASCII characters" in error["message"]


@pytest.mark.parametrize(("side", "expected"), [("left", (13, 14, 15)), (None, (13, 14, 15)), ("right", (10, 11, 12))])
async def test_prompt_is_cut_on_the_side_asked_for(rig: RouterRig, side: str | None, expected: tuple[int, ...]) -> None:
    body = {"prompt": list(range(10, 16)), "truncate_prompt_tokens": 3, "truncation_side": side, "max_tokens": 1}

    assert await ignored_of(rig, TEXT, body) == set()
    assert rig.prefill[0].seen[0].prompt_token_ids == expected


async def test_prompt_cut_on_the_right_fits_the_context(rig: RouterRig) -> None:
    body = {"prompt": [5] * 300 + [6] * 300, "truncate_prompt_tokens": -1, "truncation_side": "right", "max_tokens": 12}

    assert await ignored_of(rig, TEXT, body) == set()
    assert rig.prefill[0].seen[0].prompt_token_ids == (5,) * 300 + (6,) * 200


async def test_usage_that_must_not_be_sent_cannot_be_continuous(rig: RouterRig) -> None:
    options = {"include_usage": False, "continuous_usage_stats": True}
    response = await rig.complete("x", max_tokens=3, stream=True, stream_options=options)

    assert all("usage" not in chunk for chunk in events(response))
    assert response.headers["x-baton-ignored"] == "stream_options.continuous_usage_stats"


@pytest.mark.parametrize("fields", [{"reasoning_effort": 5}, {"verbosity": ["low"]}, {"store": "yes"}, {"no_such": 0}])
async def test_what_is_not_understood_is_still_refused_by_name(rig: RouterRig, fields: dict[str, Any]) -> None:
    response = await rig.chat("x", **fields)

    assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(fields)))
