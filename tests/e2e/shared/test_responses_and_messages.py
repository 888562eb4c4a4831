"""/v1/responses and /v1/messages with popular clients, against a real cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.support.cluster.cluster import ClusterProcess
from tests.support.cluster.http_completions import queue_of_work

USER: Any = {"role": "user", "content": "Tell me a story about the sea."}
MORE: Any = {"role": "user", "content": "And then?"}
MAX_TOKENS = 12


@pytest.fixture
def client(cluster: ClusterProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60.0) as client:
        yield client


@pytest.fixture
def claude(cluster: ClusterProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=cluster.url, api_key="none", max_retries=0, timeout=60.0) as client:
        yield client


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def chat(client: openai.OpenAI, model: str, messages: list[Any]) -> str:
    """The answer of a chat to the same conversation."""
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=MAX_TOKENS, temperature=0)
    return str(answer.choices[0].message.content)


def test_responses_say_what_chats_say(client: openai.OpenAI, model: str) -> None:
    options: Any = {"model": model, "max_output_tokens": MAX_TOKENS, "temperature": 0}
    first = client.responses.create(input=USER["content"], **options)
    second = client.responses.create(input=MORE["content"], previous_response_id=first.id, **options)
    parsed = client.responses.parse(input=[USER], **options)
    with client.responses.stream(input=[USER], **options) as stream:
        streamed = stream.get_final_response() if [*stream][-1].type == "response.completed" else None

    text = chat(client, model, [USER])
    assert (first.output_text, parsed.output_text) == (text, text)
    assert second.output_text == chat(client, model, [USER, {"role": "assistant", "content": text}, MORE])
    assert streamed is None or streamed.output_text == text
    assert client.responses.retrieve(second.id) == second
    listed = client.responses.input_items.list(second.id, order="asc")
    assert [item.type for item in listed] == ["message"] * 3
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


async def test_response_is_cancelled_while_it_streams(cluster: ClusterProcess, model: str) -> None:
    options: Any = {"model": model, "input": "Go on.", "stream": True, "extra_body": {"ignore_eos": True}}
    async with (
        httpx.AsyncClient(base_url=cluster.url, timeout=60.0, trust_env=False) as others,
        queue_of_work(others, max_tokens=400),
        openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60.0) as client,
    ):
        stream = await client.responses.create(max_output_tokens=900, **options)
        first = await anext(stream)
        assert first.type == "response.created"

        cancelled = await client.responses.cancel(first.response.id)

        last = [event async for event in stream][-1]
    assert cancelled.status == "cancelled"
    assert last.type == "response.incomplete"
    assert last.response.status == "cancelled"


def test_messages_say_what_chats_say(client: openai.OpenAI, claude: anthropic.Anthropic, model: str) -> None:
    options: Any = {"model": model, "max_tokens": MAX_TOKENS, "extra_body": {"temperature": 0}}
    answer = claude.messages.create(messages=[USER], system="Be brief.", **options)
    with claude.messages.stream(messages=[USER], system="Be brief.", **options) as stream:
        streamed = "".join(stream.text_stream)
    counted = claude.messages.count_tokens(model=model, messages=[USER], system="Be brief.")

    text = chat(client, model, [{"role": "system", "content": "Be brief."}, USER])
    assert answer.content[0].type == "text"
    assert (answer.content[0].text, streamed) == (text, text)
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    with pytest.raises(anthropic.NotFoundError, match="no-such-model"):
        claude.messages.create(**{**options, "messages": [USER], "model": "no-such-model"})
    with pytest.raises(anthropic.BadRequestError, match="maximum context length is 1024 tokens"):
        claude.messages.create(messages=[{"role": "user", "content": "sea " * 3000}], **options)


def test_agents_use_responses(cluster: ClusterProcess, client: openai.OpenAI, model: str) -> None:
    import agents

    agents.set_tracing_disabled(True)
    asked = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60.0)
    agent = agents.Agent(
        name="teller",
        instructions="Be brief.",
        model=agents.OpenAIResponsesModel(model=model, openai_client=asked),
        model_settings=agents.ModelSettings(temperature=0, max_tokens=MAX_TOKENS),
    )
    result = agents.Runner.run_sync(agent, USER["content"])

    assert result.final_output == chat(client, model, [{"role": "system", "content": "Be brief."}, USER])


def test_both_are_in_the_document(cluster: ClusterProcess) -> None:
    paths = httpx.get(f"{cluster.url}/openapi.json", timeout=60.0, trust_env=False).json()["paths"]

    assert {"/v1/responses", "/v1/messages", "/v1/messages/count_tokens"} <= paths.keys()
