"""The HTTP application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response, status
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from kv_transfer.params import PROTOCOL_VERSION
from router.api.admin import add_admin
from router.api.answers.tokens_answer import tokens_response
from router.api.bodies.chat_body import ChatBody
from router.api.bodies.completion_body import CompletionBody
from router.api.bodies.processor_fields import with_fields_of
from router.api.bodies.tokenize_body import DetokenizeBody, TokenizeBody
from router.api.completions import answer_chat, answer_completion
from router.api.errors import error_response, http_error_response
from router.api.http.direct_routes import DirectRoutes, Endpoint
from router.api.http.guard import GuardMiddleware
from router.api.http.methods import MethodsMiddleware
from router.api.http.request_body import read_body
from router.api.ignored import HEADER as IGNORED_HEADER
from router.api.ignored import ignored_header
from router.api.internal_errors import InternalErrorMiddleware
from router.api.live import add_live
from router.api.messages.endpoints import add_messages
from router.api.openapi import body_schema, describe
from router.api.prompts import check_vocabulary, encode, render_chat
from router.api.request_id import RequestIdMiddleware
from router.api.responses.endpoints import add_responses
from router.api.server_info import Facts, add_server_info, no_facts
from router.api.traces import add_traces, tracing_refusals
from router.errors import InvalidRequestError, NoReplicaError, RouterError
from router.security import SecuritySettings
from router.service import RouterService
from router.version import baton_version

MAX_SHOWN_CHARACTERS = 80
"""How many characters of a path a message quotes."""

_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/responses/{id}",
        "/v1/responses/input_tokens",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/requests",
        "/v1/requests/{id}",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/load",
        "/",
        "/health",
        "/healthz",
        "/v1/health",
        "/ready",
        "/ping",
        "/version",
        "/status",
        "/metrics",
        "/admin/drain",
        "/admin/move",
        "/admin/faults",
        "/admin/lean",
        "/admin/events",
        "/live/{name}",
        "/reset_prefix_cache",
        "/server_info",
    }
)


def build_app(
    service: RouterService,
    *,
    answers_request_id: bool = True,
    security: SecuritySettings | None = None,
    facts: Facts = no_facts,
) -> FastAPI:
    """The application around a service. Its lifespan starts and closes the service.

    ``answers_request_id`` False is for a server that adds the request id to each answer itself, as Serve does.
    ``facts`` supplies what /server_info reports besides the service's own data.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(title="Baton", version=baton_version(), lifespan=lifespan)
    security = security or SecuritySettings()
    describe(app, security)
    generating = {**_add_generation(app, service), **add_responses(app, service), **add_messages(app, service)}
    endpoints = {path: tracing_refusals(endpoint, service) for path, endpoint in generating.items()}
    # Innermost of all middleware, which are added from the inside out.
    app.add_middleware(MethodsMiddleware, routes=app.router.routes)
    app.add_middleware(DirectRoutes, endpoints=endpoints, write_timeout_s=service.settings.write_timeout_s)
    _add_security(app, security)
    app.add_middleware(InternalErrorMiddleware)
    app.add_middleware(
        RequestIdMiddleware, metrics=service.metrics, paths=_PATHS, answers_request_id=answers_request_id
    )
    _add_error_handlers(app)
    _add_tokens(app, service)
    _add_models(app, service)
    _add_operations(app, service)
    add_traces(app, service)
    add_admin(app, service)
    add_live(app, service)
    add_server_info(app, service, version=app.version, facts=facts)
    return app


def _add_security(app: FastAPI, settings: SecuritySettings) -> None:
    app.add_middleware(GuardMiddleware, settings=settings)
    if settings.cors_allow_origins:
        # Outside the guard: browsers send preflights without the key, and must be able to read a refusal.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_allow_origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "Retry-After", IGNORED_HEADER),
        )


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RouterError)
    async def on_router_error(_: Request, error: RouterError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def on_wrong_parameter(_: Request, error: RequestValidationError) -> Response:
        problem = error.errors()[0]
        name = str(problem["loc"][-1])
        reason = f"the parameter '{name}' is invalid: {problem['msg']}"
        return error_response(InvalidRequestError(reason, code="invalid_parameter", param=name))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        return http_error_response(error.status_code, _http_problem(request, error), error.headers)


def _http_problem(request: Request, error: HTTPException) -> str:
    """What is wrong with a request that matches no endpoint, by its method and path."""
    method, path = request.method[:MAX_SHOWN_CHARACTERS], request.url.path[:MAX_SHOWN_CHARACTERS]
    method = "GET" if method == "HEAD" else method  # HEAD has the headers of a GET, including Content-Length
    if error.status_code == status.HTTP_404_NOT_FOUND:
        return f"{method} {path}: there is no such path; GET /docs lists all paths"
    if error.status_code == status.HTTP_405_METHOD_NOT_ALLOWED:
        return (
            f"{method} {path}: this path does not support {method}; the header Allow names the methods that it supports"
        )
    return f"{method} {path}: {error.detail}"


def _add_generation(app: FastAPI, service: RouterService) -> dict[str, Endpoint]:
    @app.post("/v1/chat/completions", openapi_extra=body_schema(with_fields_of(service.params, ChatBody)))
    async def create_chat_completion(request: Request) -> Response:
        """Continue a conversation."""
        return await answer_chat(service, request)

    @app.post("/v1/completions", openapi_extra=body_schema(with_fields_of(service.params, CompletionBody)))
    async def create_completion(request: Request) -> Response:
        """Continue a text."""
        return await answer_completion(service, request)

    return {"/v1/chat/completions": create_chat_completion, "/v1/completions": create_completion}


def _add_tokens(app: FastAPI, service: RouterService) -> None:
    @app.post("/tokenize", openapi_extra=body_schema(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """The token ids of a text or of a conversation."""
        async with read_body(request, TokenizeBody, settings=service.settings, room=service.body_room) as body:
            service.check_model(body.model)
            if body.prompt is None:
                text = await render_chat(service, body)
                ids = await encode(service, text, add_special_tokens=bool(body.add_special_tokens))
            else:
                ids = await encode(service, body.prompt, add_special_tokens=body.add_special_tokens is not False)
            return tokens_response(
                ids,
                service.tokenizer,
                max_model_len=service.max_model_len(),
                with_strings=bool(body.return_token_strs),
                headers=ignored_header(body, service.chat_renderer.templates),
            )

    @app.post("/detokenize", openapi_extra=body_schema(DetokenizeBody))
    async def detokenize(request: Request, response: Response) -> dict[str, str]:
        """The text of token ids, special tokens included."""
        async with read_body(request, DetokenizeBody, settings=service.settings, room=service.body_room) as body:
            service.check_model(body.model)
            check_vocabulary(body.tokens, service.vocab_size(), param="tokens")
            response.headers.update(ignored_header(body, None))
            return {"prompt": service.tokenizer.decode(body.tokens, skip_special_tokens=False)}


def _add_models(app: FastAPI, service: RouterService) -> None:
    def card(name: str) -> dict[str, object]:
        try:
            max_model_len: int | None = service.max_model_len()
        except NoReplicaError:
            max_model_len = None
        return {
            "id": name,
            "object": "model",
            "created": service.view.created_s,
            "owned_by": "baton",
            "root": service.model_name,
            "max_model_len": max_model_len,
        }

    @app.get("/v1/models")
    async def list_models() -> dict[str, object]:
        """The models served here."""
        return {"object": "list", "data": [card(name) for name in service.served_models()]}

    @app.get("/v1/models/{model:path}")
    async def get_model(model: str) -> dict[str, object]:
        """One model."""
        service.check_model(model)
        return card(model)


def _add_operations(app: FastAPI, service: RouterService) -> None:
    @app.get("/health")
    @app.get("/healthz")
    @app.get("/ping")
    @app.get("/v1/health")
    async def is_live() -> dict[str, str]:
        """Check that this process answers."""
        return {"status": "ok"}

    @app.get("/ready")
    async def is_ready() -> Response:
        """Check that a prefill and a decode worker take requests and are connected to each other."""
        missing = service.waits_for()
        if not missing:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "starting", "waits_for": missing}, status_code=503, headers={"Retry-After": "1"})

    @app.get("/version")
    async def get_version() -> dict[str, str | int]:
        """The versions of Baton and of its KV transfer protocol."""
        return {"version": baton_version(), "protocol_version": PROTOCOL_VERSION}

    @app.get("/status")
    async def get_status() -> dict[str, object]:
        """The current state of every router and every worker, and their totals."""
        return await service.view.status()

    @app.get("/load")
    async def get_load() -> dict[str, int]:
        """Sequences in progress on this router, and how many of them wait for KV memory."""
        return {"server_load": service.num_alive, "num_waiting": service.num_waiting}

    @app.get("/metrics")
    async def get_metrics() -> Response:
        """Metrics of all routers and workers, for Prometheus."""
        return PlainTextResponse(
            await service.view.metrics_text(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )
