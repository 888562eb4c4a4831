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


class CompletionTokensDetails(Answer):
    """What of an answer was not the answer itself, and what came true of a prediction."""

    reasoning_tokens: int | None = Field(None, description="Of a model that thinks.")
    accepted_prediction_tokens: int | None = Field(
        None,
        description="Tokens of the `prediction` that the answer said; without one, right drafts of the workers.",
    )
    rejected_prediction_tokens: int | None = Field(None, description="All others.")


class Usage(Answer):
    """How many tokens an answer took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = Field(
        None, description="Of a model that thinks, and of an answer that was predicted, be it by draft tokens."
    )


class CalledFunction(Answer):
    """A function and its arguments."""

    name: str
    arguments: str = Field(description="JSON text; unfinished where the answer was cut off.")


class ToolCallAnswer(Answer):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Answer):
    """The model's turn."""

    role: Literal["assistant"]
    content: str | None = Field(description="Null where the turn is nothing but calls.")
    reasoning_content: str | None = Field(None, description="Of a model that thinks; `reasoning` is the same.")
    tool_calls: list[ToolCallAnswer] | None = None


class Choice(Answer):
    """What both kinds of choices have."""

    index: int
    logprobs: JsonMap | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = Field(None, description="Of a beam search: the sum over the output's tokens.")
    beam_score: float | None = Field(None, description="Of a beam search: what outputs are ranked by.")


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


class ResponseUsage(Answer):
    """How many tokens a response took."""

    input_tokens: int
    input_tokens_details: JsonMap
    output_tokens: int
    output_tokens_details: JsonMap
    total_tokens: int


class ResponseObject(Answer):
    """Answer of /v1/responses. Parameters come back as they were taken."""

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


class ResponseItems(Answer):
    """Items of a conversation, a page of them."""

    object: Literal["list"]
    data: list[JsonMap]
    first_id: str | None
    last_id: str | None
    has_more: bool


class MessageUsage(Answer):
    """How many tokens a message took; those of the prompt that were read from the cache are counted apart."""

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
    message: str = Field(description="A sentence for people.")
    details: JsonMap | None = Field(None, description="What Anthropic's client reads of a refused thread.")


class MessagesErrorAnswer(Answer):
    """Every error of /v1/messages, in Anthropic's shape."""

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
    leanings: JsonMap
    scaling: JsonMap


class RequestList(Answer):
    """The last requests, newest first."""

    object: Literal["list"]
    data: list[JsonMap]


class RequestTraceAnswer(Answer):
    """What became of a request: spans without a parent follow each other and add up to ``total_ms``."""

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
