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

    message: str = Field(description="Explanation for people.")
    type: str
    param: str | None = Field(description="The parameter that caused the error, if any.")
    code: str = Field(description="Identifier for programs; it does not change.")


class ErrorAnswer(Answer):
    """Every error, in OpenAI's format."""

    error: ErrorDetails


class PromptTokensDetails(Answer):
    """Details of the prompt's tokens."""

    cached_tokens: int


class CompletionTokensDetails(Answer):
    """Details of the answer's tokens."""

    reasoning_tokens: int | None = Field(None, description="Tokens of the model's reasoning.")
    accepted_prediction_tokens: int | None = Field(
        None,
        description="Tokens of the `prediction` that the answer contains; without one, accepted draft tokens.",
    )
    rejected_prediction_tokens: int | None = Field(
        None, description="Tokens of the `prediction`, or draft tokens, that were not accepted."
    )


class Usage(Answer):
    """Token counts of an answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = Field(
        None, description="Present if the model reasons, or if a `prediction` or draft tokens were used."
    )


class CalledFunction(Answer):
    """A function and its arguments."""

    name: str
    arguments: str = Field(description="JSON text; incomplete if the answer was cut off.")


class ToolCallAnswer(Answer):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Answer):
    """The model's turn."""

    role: Literal["assistant"]
    content: str | None = Field(description="Null if the turn only calls tools.")
    reasoning_content: str | None = Field(None, description="The model's reasoning; `reasoning` has the same content.")
    tool_calls: list[ToolCallAnswer] | None = None


class Choice(Answer):
    """Fields that the choices of chats and text completions share."""

    index: int
    logprobs: JsonMap | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = Field(None, description="With beam search: sum of log-probabilities.")
    beam_score: float | None = Field(None, description="With beam search: score by which outputs are ranked.")


class ChatChoice(Choice):
    """One continuation of a conversation."""

    message: AssistantMessage


class TextChoice(Choice):
    """One continuation of a text."""

    text: str


class Completion(Answer):
    """Fields that the answers to chats and text completions share."""

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


class ResponseUsage(Answer):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: JsonMap
    output_tokens: int
    output_tokens_details: JsonMap
    total_tokens: int


class ResponseObject(Answer):
    """Answer of /v1/responses. It repeats the parameters that were used."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: JsonMap | None
    incomplete_details: JsonMap | None
    model: str
    output: list[JsonMap]
    previous_response_id: str | None
    usage: ResponseUsage | None


class DeletedResponse(Answer):
    """Answer to the deletion of a response."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseItems(Answer):
    """A page of a conversation's items."""

    object: Literal["list"]
    data: list[JsonMap]
    first_id: str | None
    last_id: str | None
    has_more: bool


class MessageUsage(Answer):
    """Token counts of a message; prompt tokens read from the cache are counted separately."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageObject(Answer):
    """Answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[JsonMap]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class InputTokenCount(Answer):
    """Answer of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class TokenCount(Answer):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: int


class MessagesErrorDetails(Answer):
    """Why a request was refused or failed."""

    type: str
    message: str = Field(description="Explanation for people.")
    details: JsonMap | None = Field(None, description="Details for Anthropic's client of why a thread was refused.")


class MessagesErrorAnswer(Answer):
    """Every error of /v1/messages, in Anthropic's format."""

    type: Literal["error"]
    error: MessagesErrorDetails


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
    """The state of the server."""

    status: str


class Version(Answer):
    """The versions of Baton and of its KV transfer protocol."""

    version: str
    protocol_version: int


class RouterLoad(Answer):
    """The load of one router."""

    server_load: int
    num_waiting: int


class Order(Answer):
    """The workers that got an order."""


class CacheResets(Answer):
    """What each worker dropped, or why it dropped nothing."""

    success: bool
    workers: list[JsonMap]


class ServerInfo(Answer):
    """Versions, models, workers and the effective configuration."""

    version: str
    protocol_version: int
    models: list[str]
    workers: list[JsonMap]


class ClusterStatus(Answer):
    """Every router and every worker, and their totals."""

    model: str
    router: JsonMap
    routers: list[JsonMap]
    pools: dict[str, list[JsonMap]]
    totals: JsonMap
    leanings: JsonMap
    scaling: JsonMap


class RequestList(Answer):
    """The latest requests, newest first."""

    object: Literal["list"]
    data: list[JsonMap]


class RequestTraceAnswer(Answer):
    """The trace of a request. Spans without a parent follow each other and add up to ``total_ms``."""

    id: str
    state: Literal["running", "finished", "failed", "aborted", "refused"]
    model: str
    endpoint: str
    started_unix_s: float
    total_ms: float
    ttft_ms: float | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish_reason: str | None
    trace_id: str | None
    spans: list[JsonMap]
    choices: list[JsonMap]
    gaps: JsonMap
    num_choices: int
    other_choices: list[JsonMap]
