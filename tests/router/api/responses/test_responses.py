"""/v1/responses by the official client: answers, streams, conversations that are kept, and refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from router.security import SecuritySettings, hash_key, new_key
from router.text.tokenizer import Tokenizer
from tests.support.loop_time import LoopTime
from tests.support.router.fake_workers import scripted
from tests.support.router.live_app import live_app
from tests.support.router.router_peers import PeerNet
from tests.support.router.router_rig import FAST, RouterRig, router_rig, until

ANSWER = "hello world, how are you today? 日本 🙂"
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


@dataclass
class Live:
    rig: RouterRig
    client: openai.AsyncOpenAI
    num_tokens: int

    async def create(self, **options: Any) -> Response:
        options = {"model": "tiny", "input": "hi", "max_output_tokens": self.num_tokens, **options}
        response: Response = await self.client.responses.create(**options)
        return response

    def prompt(self, index: int = -1) -> str:
        return self.rig.service.tokenizer.decode(self.rig.prefill[0].seen[index].prompt_token_ids)


@pytest.fixture
async def live(model_dir: Path) -> AsyncIterator[Live]:
    tokenizer = Tokenizer.load(model_dir)
    script = [*tokenizer.encode(ANSWER), *tokenizer.encode("<|end|>")]
    async with (
        router_rig(model_dir, next_token=scripted(script)) as rig,
        live_app(rig.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Live(rig, client, len(script) - 1)


async def test_answer(live: Live) -> None:
    answer = await live.create(
        instructions="Be brief.", metadata={"a": "b"}, temperature=0.5, reasoning={"effort": "low"}, user="me"
    )

    assert Response.model_validate(answer.model_dump(), strict=False).output_text == ANSWER
    assert live.prompt() == "[system] Be brief.\n[user] hi\n[assistant] "
    assert (answer.status, answer.incomplete_details) == ("incomplete", answer.incomplete_details)
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.output_tokens == live.num_tokens
    assert answer.usage.total_tokens == answer.usage.input_tokens + live.num_tokens
    assert (answer.metadata, answer.temperature, answer.instructions) == ({"a": "b"}, 0.5, "Be brief.")


async def test_answer_that_the_model_ends_is_complete(live: Live) -> None:
    answer = await live.create(max_output_tokens=live.num_tokens + 9)

    assert (answer.status, answer.output_text) == ("completed", ANSWER)
    assert answer.output[0].status == "completed"  # type: ignore[union-attr]


@pytest.mark.parametrize("is_complete", [True, False])
async def test_events_are_those_that_clients_know(live: Live, is_complete: bool) -> None:
    body = {"input": "hi", "stream": True, "max_output_tokens": live.num_tokens + is_complete}
    answer = await live.rig.client.post("/v1/responses", json=body)
    parts = [part.split("\n") for part in answer.text.split("\n\n") if part]
    events = [EVENT.validate_json(data.removeprefix("data: ")) for _, data in parts]

    assert [name.removeprefix("event: ") for name, _ in parts] == [event.type for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    end = "response.completed" if is_complete else "response.incomplete"
    num_deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * num_deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        end,
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    last: Any = events[-1]
    stored = await live.client.responses.retrieve(last.response.id)
    assert stored == last.response
    assert stored.output_text == ANSWER


async def test_stream_helper(live: Live) -> None:
    async with live.client.responses.stream(model="tiny", input="hi", max_output_tokens=live.num_tokens + 1) as stream:
        final = await stream.get_final_response()

    assert (final.output_text, final.status) == (ANSWER, "completed")


async def test_conversation_goes_on_from_what_is_kept(live: Live) -> None:
    first = await live.create(instructions="Be brief.")
    second = await live.create(input="and then?", previous_response_id=first.id)
    third = await live.create(
        input=[{"role": "user", "content": [{"type": "input_text", "text": "so?"}]}], previous_response_id=second.id
    )
    turn = f"[assistant] {ANSWER}\n"

    assert live.prompt() == f"[user] hi\n{turn}[user] and then?\n{turn}[user] so?\n[assistant] "
    assert third.previous_response_id == second.id
    items: list[Any] = [item async for item in live.client.responses.input_items.list(third.id, order="asc", limit=2)]
    assert [item.content[0].text for item in items] == ["hi", ANSWER, "and then?", ANSWER, "so?"]
    newest: Any = await live.client.responses.input_items.list(third.id, limit=1)
    assert [item.content[0].text for item in newest.data] == ["so?"]


async def test_output_can_be_sent_back_as_items(live: Live) -> None:
    first = await live.create()
    turns: Any = [{"role": "user", "content": "hi"}, *(item.model_dump() for item in first.output)]

    raw = await live.client.responses.with_raw_response.create(
        model="tiny", input=[*turns, {"role": "user", "content": "go on"}], max_output_tokens=1
    )

    assert "x-baton-ignored" not in raw.headers
    assert live.prompt() == f"[user] hi\n[assistant] {ANSWER}\n[user] go on\n[assistant] "


async def test_what_is_not_kept_is_not_found(live: Live) -> None:
    unkept = await live.create(store=False)
    deleted = await live.create()
    await live.client.responses.delete(deleted.id)

    for response_id in (unkept.id, deleted.id, "resp_x", "nonsense", f"resp_elsewhere_{'0' * 32}"):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            await live.client.responses.retrieve(response_id)
        with pytest.raises(openai.NotFoundError):
            await live.client.responses.input_items.list(response_id)
        with pytest.raises(openai.NotFoundError):
            await live.client.responses.delete(response_id)
        with pytest.raises(openai.BadRequestError) as caught:
            await live.create(previous_response_id=response_id)
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


async def test_response_that_runs_can_be_read_and_cancelled(live: Live) -> None:
    live.rig.decode[0].step_gate.clear()
    stream = await live.client.responses.create(model="tiny", input="hi", max_output_tokens=200, stream=True)
    event: Any = await anext(aiter(stream))
    response_id = event.response.id
    assert (await live.client.responses.retrieve(response_id)).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="still being generated"):
        await live.create(previous_response_id=response_id)

    cancelled = await live.client.responses.cancel(response_id)
    rest: list[Any] = [event async for event in stream]

    assert cancelled.status == "cancelled"
    assert (rest[-1].type, rest[-1].response.status) == ("response.incomplete", "cancelled")
    await until(live.rig.is_at_rest)
    assert (await live.client.responses.retrieve(response_id)).status == "cancelled"
    live.rig.decode[0].step_gate.set()
    finished = await live.create()
    with pytest.raises(openai.BadRequestError, match="is incomplete and cannot be cancelled"):
        await live.client.responses.cancel(finished.id)


async def test_client_that_leaves_ends_its_response(live: Live) -> None:
    live.rig.decode[0].step_gate.clear()
    stream = await live.client.responses.create(model="tiny", input="hi", max_output_tokens=200, stream=True)
    event: Any = await anext(aiter(stream))
    await stream.close()

    await until(live.rig.is_at_rest)
    store = live.rig.service.responses.store
    await until(lambda: store.num_running == 0)
    assert store.num_stored == 0
    with pytest.raises(openai.NotFoundError):
        await live.client.responses.retrieve(event.response.id)


@pytest.mark.parametrize("included", [["message.output_text.logprobs"], []])
async def test_log_probabilities(live: Live, included: list[str]) -> None:
    answer = await live.create(include=included, top_logprobs=2, stream=True)
    deltas = [event async for event in answer]  # type: ignore[attr-defined]

    told = [item for event in deltas if event.type == "response.output_text.delta" for item in event.logprobs]
    done = next(event for event in deltas if event.type == "response.output_text.done")
    assert len(told) == len(done.logprobs) == live.num_tokens
    assert all(len(item.top_logprobs) == 2 for item in told)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"background": True}, "background", "unsupported_parameter"),
    ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
    ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
    ({"tools": [{"type": "web_search"}]}, "tools.0", "unsupported_parameter"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "unsupported_parameter"),
    ({"input": [{"type": "computer_call"}]}, "input.0", "unsupported_parameter"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input.0.content.0",
        "unsupported_parameter",
    ),
    ({"input": []}, "input", "invalid_parameter"),
    ({"input": [{"role": "boss", "content": "x"}]}, "input", "invalid_parameter"),
    ({"temperature": -1}, "temperature", "invalid_parameter"),
    ({"max_output_tokens": 9999}, "max_output_tokens", "context_length_exceeded"),
    ({"input": "sea " * 9000}, "input", "context_length_exceeded"),
    ({"top_logprobs": 99}, "top_logprobs", "invalid_parameter"),
    ({"max_tokens": 5}, "max_tokens", "unknown_parameter"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format", "invalid_parameter"),
    ({"model": "other"}, "model", "model_not_found"),
    ({"metadata": {str(index): "" for index in range(17)}}, "metadata", "invalid_parameter"),
]


@pytest.mark.parametrize(("options", "param", "code"), REFUSED)
async def test_refusals_name_the_parameter(live: Live, options: dict[str, Any], param: str, code: str) -> None:
    answer = await live.rig.client.post("/v1/responses", json={"input": "hi", **options})

    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code), error
    assert answer.status_code == (404 if code == "model_not_found" else 400)
    assert "'messages" not in error["message"]
    assert "max_completion_tokens" not in error["message"]
    assert "~" not in error["message"]


async def test_what_has_no_effect_is_told(live: Live) -> None:
    options = {
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "user": "u",
    }
    answer = await live.rig.client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 1, **options})

    told = answer.headers["x-baton-ignored"].split(", ")
    assert told == ["include.reasoning.encrypted_content", "reasoning.effort", "reasoning.summary", "user"]


async def test_count_of_input_tokens_is_that_of_the_prompt(live: Live) -> None:
    tool: Any = {"type": "function", "name": "look"}
    first = await live.create(instructions="Be brief.")
    second = await live.create(input="more", previous_response_id=first.id)
    count = live.client.responses.input_tokens.count

    assert first.usage is not None
    assert second.usage is not None
    assert (await count(model="tiny", input="hi", instructions="Be brief.")).input_tokens == first.usage.input_tokens
    following = await count(input="more", previous_response_id=first.id)
    assert following.input_tokens == second.usage.input_tokens
    assert following.object == "response.input_tokens"
    with pytest.raises(openai.NotFoundError, match="other"):
        await count(model="other", input="hi")
    with pytest.raises(openai.BadRequestError, match="resp_none"):
        await count(input="hi", previous_response_id="resp_none")
    with pytest.raises(openai.BadRequestError, match=r"tools\.0"):
        await count(input="hi", tools=[{**tool, "type": "web_search"}])


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "after=nothing"])
async def test_wrong_pages_are_refused(live: Live, query: str) -> None:
    kept = await live.create()
    answer = await live.rig.client.get(f"/v1/responses/{kept.id}/input_items?{query}")

    assert answer.status_code == httpx.codes.BAD_REQUEST
    assert answer.json()["error"]["param"] == query.partition("=")[0]


async def test_each_key_sees_only_its_own_responses(model_dir: Path) -> None:
    mine, yours = new_key(), new_key()
    security = SecuritySettings(api_keys=(hash_key(mine), hash_key(yours)))
    async with router_rig(model_dir, security=security) as rig:
        headers = [{"Authorization": f"Bearer {key}"} for key in (mine, yours)]
        body = {"input": "hi", "max_output_tokens": 2}
        made = (await rig.client.post("/v1/responses", json=body, headers=headers[0])).json()
        path = f"/v1/responses/{made['id']}"
        codes = [(await rig.client.get(path, headers=each)).status_code for each in headers]
        follow = {**body, "previous_response_id": made["id"]}
        theirs = await rig.client.post("/v1/responses", json=follow, headers=headers[1])

        assert codes == [200, 404]
        assert theirs.json()["error"]["code"] == "previous_response_not_found"
        assert (await rig.client.delete(path, headers=headers[1])).status_code == httpx.codes.NOT_FOUND
        assert (await rig.client.delete(path, headers=headers[0])).json()["deleted"]


async def test_any_router_follows_on_what_another_one_keeps(model_dir: Path) -> None:
    net = PeerNet()
    async with AsyncExitStack() as stack:
        rigs: list[RouterRig] = []
        for name in ("one", "two"):
            rig = await stack.enter_async_context(
                router_rig(model_dir, settings=FAST, router_id=name, peers=net.seen_by(name))
            )
            net.views[name], net.stores[name] = rig.service.view, rig.service.responses.store
            rigs.append(rig)
        one, two = (rig.client for rig in rigs)
        body = {"input": "hi", "max_output_tokens": 2}
        first = (await one.post("/v1/responses", json=body)).json()
        second = await two.post("/v1/responses", json={**body, "previous_response_id": first["id"]})

        assert second.status_code == httpx.codes.OK
        assert (await two.get(f"/v1/responses/{first['id']}")).json() == first
        assert (await one.get(f"/v1/responses/{second.json()['id']}")).json() == second.json()
        await two.delete(f"/v1/responses/{first['id']}")
        assert (await one.get(f"/v1/responses/{first['id']}")).status_code == httpx.codes.NOT_FOUND

        del net.stores["two"]
        silent = await one.get(f"/v1/responses/{second.json()['id']}")
        assert (silent.status_code, silent.json()["error"]["code"]) == (503, "response_unreachable")
        del net.views["two"]
        gone = await one.get(f"/v1/responses/{second.json()['id']}")
        assert gone.status_code == httpx.codes.NOT_FOUND


async def test_error_in_a_stream_is_its_last_event(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        time = LoopTime()
        rig.decode[0].step_gate.clear()
        sending = asyncio.create_task(
            rig.client.post("/v1/responses", json={"input": "hi", "stream": True}, headers={"X-Request-Timeout": "30"})
        )
        await until(lambda: bool(rig.decode[0].running))
        time.advance(30.0)
        text = (await sending).text
        last = EVENT.validate_json(text.rstrip("\n").split("\n")[-1].removeprefix("data: "))
        assert last.type == "response.failed"
        kept = await rig.client.get(f"/v1/responses/{last.response.id}")

    assert last.response.error is not None
    assert (kept.status_code, kept.json()["status"]) == (httpx.codes.OK, "failed")
    assert kept.json()["error"]["message"] == last.response.error.message
