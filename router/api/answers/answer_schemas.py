"""What the OpenAPI document says of answers. Answers are written without these models, which only describe them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

JsonMap = dict[str, Any]


class Answer(BaseModel):
    """More fields may come with later versions."""

    model_config = ConfigDict(extra="allow")


class ErrorDetails(Answer):
    """Why a request was refused or failed."""

    message: str = Field(description="A sentence for people.")
    type: str
    param: str | None = Field(description="The parameter to blame, where there is one.")
    code: str = Field(description="Stable, for machines.")


class ErrorAnswer(Answer):
    """Every error, in OpenAI's shape."""

    error: ErrorDetails


class PromptTokensDetails(Answer):
    """What of a prompt was cheap."""

    cached_tokens: int


class Usage(Answer):
    """How many tokens an answer took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AssistantMessage(Answer):
    """The model's turn."""

    role: Literal["assistant"]
    content: str


class Choice(Answer):
    """What both kinds of choices have."""

    index: int
    logprobs: JsonMap | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None = None


class ChatChoice(Choice):
    """One continuation of a conversation."""

    message: AssistantMessage


class TextChoice(Choice):
    """One continuation of a text."""

    text: str


class Completion(Answer):
    """What both kinds of answers have."""

    id: str
    created: int
    model: str
    usage: Usage


class ChatCompletion(Completion):
    """Answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextCompletion(Completion):
    """Answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class Tokens(Answer):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class Text(Answer):
    """Answer of /detokenize."""

    prompt: str


class ModelCard(Answer):
    """One model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | None


class ModelList(Answer):
    """All models."""

    object: Literal["list"]
    data: list[ModelCard]


class State(Answer):
    """That something is so."""

    status: str


class Version(Answer):
    """Which Baton."""

    version: str
    protocol_version: int


class RouterLoad(Answer):
    """How much one router has to do."""

    server_load: int
    num_waiting: int


class Order(Answer):
    """Which workers an order went to."""


class CacheResets(Answer):
    """What each worker dropped, or why it dropped nothing."""

    success: bool
    workers: list[JsonMap]


class ServerInfo(Answer):
    """What runs here, and how it is configured."""

    version: str
    protocol_version: int
    models: list[str]
    workers: list[JsonMap]


class ClusterStatus(Answer):
    """Every router and every replica, and the totals of all."""

    model: str
    router: JsonMap
    routers: list[JsonMap]
    pools: dict[str, list[JsonMap]]
    totals: JsonMap
