"""Popular client libraries, each asked the same way: a chat, a stream, a turn sent back, and its errors."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MAX_TOKENS = 12
TIMEOUT_S = 240.0
KEY = "none"

# Read when the libraries are imported: none is to fetch prices, or to tell anybody of its calls.
QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LANGSMITH_TRACING": "false",
    "LANGCHAIN_TRACING_V2": "false",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer's text, and the library's own object for that turn, as its users put it back into a conversation."""

    text: str
    turn: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLibrary:
    """One library; each error is the exception that it raises for it. Messages are dictionaries, or its own turns."""

    chat: Callable[..., Reply]
    stream: Callable[[Sequence[Any]], str]
    context_error: type[Exception]
    model_error: type[Exception]
    parameter_error: type[Exception]


def openai_library(url: str, model: str) -> ClientLibrary:
    """The official client. Its answers are sent back as the objects that it returned."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=TIMEOUT_S)
    return _of_openai(client, model, turn=lambda message: message)


def instructor_library(url: str, model: str) -> ClientLibrary:
    """Instructor's client, asked for plain text: the official one behind it, but its turns must be dictionaries."""
    import instructor
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=TIMEOUT_S)
    patched = instructor.from_openai(client, mode=instructor.Mode.MD_JSON)
    return _of_openai(patched, model, turn=lambda message: message.model_dump(), response_model=None)


def _of_openai(client: Any, model: str, *, turn: Callable[[Any], Any], **extra: Any) -> ClientLibrary:
    import openai

    def create(messages: Sequence[Any], **changes: Any) -> Any:
        fields = {"model": model, "max_tokens": MAX_TOKENS, "temperature": 0, **extra, **changes}
        return client.chat.completions.create(messages=list(messages), **fields)

    def chat(messages: Sequence[Any], **changes: Any) -> Reply:
        message = create(messages, **changes).choices[0].message
        return Reply(message.content, turn(message))

    def stream(messages: Sequence[Any]) -> str:
        return "".join(chunk.choices[0].delta.content or "" for chunk in create(messages, stream=True))

    return ClientLibrary(
        chat=chat,
        stream=stream,
        context_error=openai.BadRequestError,
        model_error=openai.NotFoundError,
        parameter_error=openai.BadRequestError,
    )


def langchain_library(url: str, model: str) -> ClientLibrary:
    """LangChain's ChatOpenAI."""
    import openai
    from langchain_openai import ChatOpenAI
    from langchain_openai.chat_models.base import OpenAIContextOverflowError

    def client(**changes: Any) -> ChatOpenAI:
        fields = {"model": model, "temperature": 0, "max_tokens": MAX_TOKENS, **changes}
        return ChatOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=TIMEOUT_S, **fields)

    def chat(messages: Sequence[Any], **changes: Any) -> Reply:
        answer = client(**changes).invoke(list(messages))
        return Reply(str(answer.content), answer)

    def stream(messages: Sequence[Any]) -> str:
        return "".join(str(chunk.content) for chunk in client(stream_usage=True).stream(list(messages)))

    return ClientLibrary(
        chat=chat,
        stream=stream,
        context_error=OpenAIContextOverflowError,
        model_error=openai.NotFoundError,
        parameter_error=openai.BadRequestError,
    )


def litellm_library(url: str, model: str) -> ClientLibrary:
    """LiteLLM, told that the server speaks OpenAI's protocol. Its turns are sent back as dictionaries, all fields."""
    import litellm

    litellm.telemetry = False
    litellm.suppress_debug_info = True
    logging.getLogger("LiteLLM").setLevel(logging.CRITICAL)

    def complete(messages: Sequence[Any], **changes: Any) -> Any:
        fields = {"model": model, "temperature": 0, "max_tokens": MAX_TOKENS, **changes}
        fields["model"] = f"openai/{fields['model']}"
        return litellm.completion(
            messages=list(messages), api_base=f"{url}/v1", api_key=KEY, num_retries=0, timeout=TIMEOUT_S, **fields
        )

    def chat(messages: Sequence[Any], **changes: Any) -> Reply:
        message = complete(messages, **changes).choices[0].message
        return Reply(message.content, message.model_dump())

    def stream(messages: Sequence[Any]) -> str:
        return "".join(chunk.choices[0].delta.content or "" for chunk in complete(messages, stream=True))

    return ClientLibrary(
        chat=chat,
        stream=stream,
        context_error=litellm.ContextWindowExceededError,
        model_error=litellm.NotFoundError,
        parameter_error=litellm.BadRequestError,
    )


def llama_index_library(url: str, model: str) -> ClientLibrary:
    """LlamaIndex's OpenAILike."""
    import openai
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    def client(**changes: Any) -> OpenAILike:
        fields = {"model": model, "temperature": 0, "max_tokens": MAX_TOKENS, **changes}
        return OpenAILike(
            api_base=f"{url}/v1", api_key=KEY, is_chat_model=True, max_retries=0, timeout=TIMEOUT_S, **fields
        )

    def own(messages: Sequence[Any]) -> list[ChatMessage]:
        return [ChatMessage(**turn) if isinstance(turn, dict) else turn for turn in messages]

    def chat(messages: Sequence[Any], **changes: Any) -> Reply:
        temperature = changes.pop("temperature", None)
        said = {} if temperature is None else {"additional_kwargs": {"temperature": temperature}}
        answer = client(**changes, **said).chat(own(messages))
        return Reply(str(answer.message.content), answer.message)

    def stream(messages: Sequence[Any]) -> str:
        return "".join(chunk.delta or "" for chunk in client().stream_chat(own(messages)))

    return ClientLibrary(
        chat=chat,
        stream=stream,
        context_error=openai.BadRequestError,
        model_error=openai.NotFoundError,
        parameter_error=openai.BadRequestError,
    )


LIBRARIES: dict[str, Callable[[str, str], ClientLibrary]] = {
    "openai": openai_library,
    "langchain-openai": langchain_library,
    "litellm": litellm_library,
    "llama-index": llama_index_library,
    "instructor": instructor_library,
}


def make_library(name: str, url: str, model: str) -> ClientLibrary:
    """A client library, configured for a cluster and a model."""
    os.environ.update(QUIET)
    return LIBRARIES[name](url, model)
