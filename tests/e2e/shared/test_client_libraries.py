"""Popular client libraries against a real cluster: chats, streams, conversations, and errors."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from tests.support.cluster.client_libraries import LIBRARIES, MAX_TOKENS, ClientLibrary, make_library
from tests.support.cluster.cluster import ClusterProcess
from tests.support.cluster.form_clients import FORM_CLIENTS, ask_typed
from tests.support.cluster.tool_clients import TOOL_CLIENTS, call_tool

USER = {"role": "user", "content": "Tell me a story about the sea."}
SYSTEM = {"role": "system", "content": "Be brief."}
MORE = {"role": "user", "content": "And then?"}


@pytest.fixture(autouse=True)
def _only_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries may not connect to other machines: for prices, tokenizers or telemetry."""
    look_up = socket.getaddrinfo

    def look_up_here(host: Any, *arguments: Any, **options: Any) -> Any:
        assert ipaddress.ip_address(host).is_loopback, f"a library asks for {host}"
        return look_up(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up_here)


@pytest.fixture
def http(cluster: ClusterProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, timeout=60.0, trust_env=False) as client:
        yield client


@pytest.fixture
def model(http: httpx.Client) -> str:
    return str(http.get("/v1/models").json()["data"][0]["id"])


@pytest.fixture(params=list(LIBRARIES))
def library(request: pytest.FixtureRequest, cluster: ClusterProcess, model: str) -> ClientLibrary:
    return make_library(request.param, cluster.url, model)


def expected(http: httpx.Client, messages: Sequence[dict[str, Any]]) -> str:
    """The cluster's answer to a plain HTTP request."""
    body = {"messages": list(messages), "max_tokens": MAX_TOKENS, "temperature": 0}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == httpx.codes.OK, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def test_chat_and_its_stream(library: ClientLibrary, http: httpx.Client) -> None:
    text = expected(http, [SYSTEM, USER])

    assert text
    assert library.chat([SYSTEM, USER]).text == text
    assert library.stream([SYSTEM, USER]) == text


def test_answer_is_a_turn_of_the_conversation(library: ClientLibrary, http: httpx.Client) -> None:
    first = library.chat([USER])
    conversation = [USER, {"role": "assistant", "content": first.text}, MORE]

    assert library.chat([USER, first.turn, MORE]).text == expected(http, conversation)
    assert library.stream([USER, first.turn, MORE]) == expected(http, conversation)


def test_errors_are_the_librarys_own(library: ClientLibrary) -> None:
    with pytest.raises(library.model_error, match="no-such-model"):
        library.chat([USER], model="no-such-model")
    with pytest.raises(library.parameter_error, match="temperature"):
        library.chat([USER], temperature=-1)
    with pytest.raises(library.context_error, match="maximum context length is 1024 tokens"):
        library.chat([{"role": "user", "content": "sea " * 3000}])


def test_instructor_tries_again_with_the_answer_that_was_no_json(
    cluster: ClusterProcess, http: httpx.Client, model: str
) -> None:
    """Its mode that needs neither tools nor schemas: it looks for JSON in the text, and sends one without any back."""
    import instructor
    import openai
    from instructor.core.exceptions import InstructorRetryException
    from pydantic import BaseModel

    class Tale(BaseModel):
        """What is asked for."""

        hero: str

    letter = http.post("/tokenize", json={"prompt": "x", "add_special_tokens": False}).json()["tokens"][-1]
    plain = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode.MD_JSON)
    with pytest.raises(InstructorRetryException) as caught:
        client.chat.completions.create(
            model=model,
            messages=[USER],
            response_model=Tale,
            max_retries=1,
            max_tokens=MAX_TOKENS,
            logit_bias={str(letter): 100},
            stop=["xxx"],
            extra_body={"include_stop_str_in_output": True},
        )

    assert caught.value.n_attempts == 2
    assert caught.value.last_completion is not None
    assert caught.value.last_completion.choices[0].message.content.strip() == "xxx"


@pytest.mark.parametrize("name", TOOL_CLIENTS)
def test_tools_are_called_with_arguments_that_fit(name: str, cluster: ClusterProcess, model: str) -> None:
    """The model has random weights: that calls are there and fit is the grammars' doing."""
    assert call_tool(name, cluster.url, model) in ({"unit": "celsius"}, {"unit": "kelvin"})


@pytest.mark.parametrize("name", FORM_CLIENTS)
def test_typed_answers_and_agents_that_end(name: str, cluster: ClusterProcess, model: str) -> None:
    assert ask_typed(name, cluster.url, model) in ({"unit": "celsius"}, {"unit": "kelvin"})
