"""The OpenAPI document. It describes bodies, answers and errors that the framework does not know of."""

from __future__ import annotations

import functools
from collections.abc import Collection
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from engine.contract.promise import MAX_PROMISE_MS
from router.api.answers.answer_schemas import (
    CacheResets,
    ChatCompletion,
    ClusterStatus,
    DeletedResponse,
    ErrorAnswer,
    InputTokenCount,
    MessageObject,
    MessagesErrorAnswer,
    ModelCard,
    ModelList,
    Order,
    RequestList,
    RequestTraceAnswer,
    ResponseItems,
    ResponseObject,
    RouterLoad,
    ServerInfo,
    State,
    Text,
    TextCompletion,
    TokenCount,
    Tokens,
    Version,
)
from router.api.errors import is_of_messages
from router.api.http.guard import Access, GuardMiddleware
from router.api.http.headers import ITL_HEADER, TTFT_HEADER
from router.api.ignored import HEADER as IGNORED_HEADER
from router.security import SecuritySettings

_ANSWERS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": TextCompletion,
    "/v1/responses": ResponseObject,
    "/v1/responses/input_tokens": InputTokenCount,
    "/v1/responses/{response_id}": ResponseObject,
    "/v1/responses/{response_id}/cancel": ResponseObject,
    "/v1/responses/{response_id}/input_items": ResponseItems,
    "/v1/messages": MessageObject,
    "/v1/messages/count_tokens": TokenCount,
    "/v1/models": ModelList,
    "/v1/models/{model}": ModelCard,
    "/v1/requests": RequestList,
    "/v1/requests/{request_id}/trace": RequestTraceAnswer,
    "/tokenize": Tokens,
    "/detokenize": Text,
    "/health": State,
    "/ping": State,
    "/ready": State,
    "/version": Version,
    "/load": RouterLoad,
    "/status": ClusterStatus,
    "/admin/drain": Order,
    "/admin/move": Order,
    "/admin/faults": Order,
    "/admin/lean": Order,
    "/": State,
    "/healthz": State,
    "/v1/health": State,
    "/reset_prefix_cache": CacheResets,
    "/server_info": ServerInfo,
}

_ANSWERS_TO_DELETE: dict[str, type[BaseModel]] = {"/v1/responses/{response_id}": DeletedResponse}

_STREAMED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})

EVENTS_PATH = "/admin/events"

_WITH_BODY = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens"})

_STORED = "/v1/responses/{response_id}"
_FOUND = frozenset({"/v1/models/{model}", "/v1/requests/{request_id}/trace"})

_ALWAYS = (431,)
_OF_BODIES = (400, 404, 408, 413, 415, 503)
_OF_GENERATION = (429, 502, 504)
_OF_ORDERS = (403, 502)
_OF_RESETS = (403, 409, 503)
_WITH_KEYS: dict[Access, tuple[int, ...]] = {"open": (), "user": (401,), "admin": (401, 403)}

_MEANINGS = {
    400: "The request is invalid, or asks for something unsupported; `param` names the parameter.",
    401: "The API key is missing or unknown.",
    403: "The key is not an admin key, orders are disabled, or the host name or the web page's origin is not allowed.",
    404: "There is no such model, response, trace or worker.",
    409: "Requests hold KV blocks, and `preempt_running` does not allow workers to preempt them.",
    408: "The body did not arrive in time.",
    413: "The body is too large, or has too many JSON values.",
    415: "The Content-Type is not application/json, or the body is compressed.",
    429: "A limit is reached: of requests in progress or waiting, or of open event streams.",
    431: "The request has too many headers, or its URL and headers are too long.",
    502: "Workers failed, and so did retries on other workers.",
    503: "No worker can take it now, too many large bodies are being read, or another router does not answer.",
    504: "The request did not finish by its deadline.",
}

_RETRY_HEADERS = {
    "Retry-After": {"description": "Seconds after which to try again.", "schema": {"type": "integer", "minimum": 1}}
}

_IGNORED_HEADERS = {
    IGNORED_HEADER: {
        "description": "Fields of the body that have no effect. Sent only if there are any.",
        "schema": {"type": "string"},
    }
}

_EVENT = {
    "type": "object",
    "description": "`data` is a chunk as JSON, an error, or `[DONE]` at the end. Events of /v1/responses and "
    "/v1/messages have names, and their streams end without `[DONE]`.",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}

_MILLISECONDS = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_PROMISE_MS}

_REQUEST_HEADERS = (
    ("X-Request-Id", "Returned with the answer if it has 1 to 128 visible characters.", {"type": "string"}),
    ("X-Request-Timeout", "Deadline of the request in seconds.", {"type": "number", "exclusiveMinimum": 0}),
    (TTFT_HEADER, "Target for the time to first token in milliseconds; `slo` in the body overrides it.", _MILLISECONDS),
    (ITL_HEADER, "Target for the time between tokens in milliseconds; `slo` in the body overrides it.", _MILLISECONDS),
)


def body_schema(model: type[BaseModel], *, is_required: bool = True) -> dict[str, Any]:
    """The OpenAPI entry for a JSON body; nested definitions are inlined."""
    return {"requestBody": {"required": is_required, "content": {"application/json": {"schema": _schema_of(model)}}}}


def query_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI entry for the same parameters in the URL; all are booleans."""
    return {
        "parameters": [
            {"name": name, "in": "query", "required": False, "schema": {"type": "boolean"}}
            for name in model.model_fields
        ]
    }


def describe(app: FastAPI, security: SecuritySettings) -> None:
    """Make the application serve a document with the possible answers of each path."""
    guard = GuardMiddleware(app, settings=security)

    def document() -> dict[str, Any]:
        if not app.openapi_schema:
            always = _ALWAYS if security.host_rule is None else (403, *_ALWAYS)
            app.openapi_schema = _document(app, guard, always=always)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI, guard: GuardMiddleware, *, always: tuple[int, ...]) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    document["components"] = {
        "schemas": {"Error": _schema_of(ErrorAnswer), "MessagesError": _schema_of(MessagesErrorAnswer)},
        "securitySchemes": {
            "key": {"type": "http", "scheme": "bearer"},
            "x_api_key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
        },
    }
    for path, operations in document["paths"].items():
        access = guard.access_to(path)
        for method, operation in operations.items():
            codes = {*always, *_WITH_KEYS[access], *_codes(path, has_body="requestBody" in operation)}
            operation["responses"] = _responses(path, codes, method=method)
            if access != "open":
                operation["security"] = [{"key": []}, {"x_api_key": []}]
            if path in _STREAMED:
                operation.setdefault("parameters", []).extend(_header_parameters())
    return document


def _codes(path: str, *, has_body: bool) -> list[int]:
    """The error codes that are specific to a path, besides those of every path."""
    codes: list[int] = []
    if has_body:
        codes += _OF_BODIES
    if path in _STREAMED:
        codes += _OF_GENERATION
    if path == EVENTS_PATH:
        codes.append(429)
    elif path.startswith("/admin/"):
        codes += _OF_ORDERS
    if path == "/reset_prefix_cache":
        codes += _OF_RESETS
    if path == "/server_info":
        codes.append(403)
    if path.startswith(_STORED):
        codes += (400, 404, 503)
    if path in _FOUND:
        codes.append(404)
    if path == "/v1/requests":
        codes.append(400)
    return codes


def _responses(path: str, codes: Collection[int], *, method: str) -> dict[str, Any]:
    error = "MessagesError" if is_of_messages(path) else "Error"
    responses: dict[str, Any] = {"200": {"description": "Successful.", "content": _content(path, method=method)}}
    if path in _STREAMED or path in _WITH_BODY:
        responses["200"]["headers"] = _IGNORED_HEADERS
    for code in sorted(codes):
        responses[str(code)] = {
            "description": _MEANINGS[code],
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}},
        }
        if code in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            responses[str(code)]["headers"] = _RETRY_HEADERS
    if path == "/ready":
        responses["503"] = {
            "description": "No prefill worker or no decode worker takes requests yet.",
            "content": _content(path, method=method),
            "headers": _RETRY_HEADERS,
        }
    return responses


def _content(path: str, *, method: str) -> dict[str, Any]:
    if path == EVENTS_PATH:
        return {"text/event-stream": {"schema": {"type": "string"}}}
    model = (_ANSWERS_TO_DELETE if method == "delete" else _ANSWERS).get(path)
    if model is None:
        return {"text/plain": {"schema": {"type": "string"}}}
    content: dict[str, Any] = {"application/json": {"schema": _schema_of(model)}}
    if path in _STREAMED:
        content["text/event-stream"] = {"schema": _EVENT}
    return content


def _header_parameters() -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "header", "required": False, "description": text, "schema": schema}
        for name, text, schema in _REQUEST_HEADERS
    ]


@functools.cache
def _schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """A model's schema, cached because a body's takes 10 ms to make. Callers must not change it."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    inlined: dict[str, Any] = _inlined(schema, definitions)
    return inlined


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if isinstance(reference := node.get("$ref"), str):
        return _inlined(definitions[reference.rsplit("/", 1)[-1]], definitions)
    return {key: _inlined(value, definitions) for key, value in node.items()}
