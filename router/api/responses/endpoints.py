"""/v1/responses: create, read, delete and cancel a response, list its input items, count its prompt's tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Literal

from fastapi import FastAPI, Query, Request, Response
from starlette.types import Receive, Scope, Send

from router.api.answers.answer_format import Collected
from router.api.answers.sse import GenerationResponse
from router.api.answers.turn_blocks import TurnBlocks
from router.api.bodies.chat_body import ChatBody
from router.api.bodies.processor_fields import with_fields_of
from router.api.completions import start_chat
from router.api.http.direct_routes import Endpoint
from router.api.http.guard import owner_of
from router.api.http.request_body import read_body
from router.api.ignored import ignored_names, names_header
from router.api.openapi import body_schema
from router.api.prompts import encode, render_chat
from router.api.responses.body import ResponsesBody
from router.api.responses.conversation import conversation_of, page_of
from router.api.responses.record import ResponseRecord
from router.api.responses.response_format import ResponseFormat
from router.api.responses.to_chat import NAMES, chat_of
from router.api.told_as import own_name, told_as
from router.errors import InvalidRequestError
from router.request.text_output import TextOutput, TextPiece
from router.service import RouterService

PATH = "/v1/responses"
MAX_NUM_LISTED = 100


def add_responses(app: FastAPI, service: RouterService) -> dict[str, Endpoint]:
    """Add the endpoints.

    Returns:
        The endpoints that generate, by path.
    """
    model = with_fields_of(service.params, ResponsesBody)

    @app.post(PATH, openapi_extra=body_schema(model))
    async def create_response(request: Request) -> Response:
        """Generate a response, and store it so that later requests can continue from it."""
        async with read_body(request, model, settings=service.settings, room=service.body_room) as body:
            with told_as(NAMES):
                return await _create(service, request, body)

    @app.get(PATH + "/{response_id}")
    async def get_response(request: Request, response_id: str, stream: bool = False) -> Response:
        """Get a stored response, or one that is still being generated."""
        if stream:
            raise InvalidRequestError(
                "a stored response cannot be streamed: set stream when you create it",
                code="unsupported_parameter",
                param="stream",
            )
        found = await service.responses.read(response_id, owner=owner_of(request.scope))
        return Response(found.body, media_type="application/json")

    @app.delete(PATH + "/{response_id}")
    async def delete_response(request: Request, response_id: str) -> dict[str, object]:
        """Delete a response. If it is still being generated, it is cancelled."""
        await service.responses.take_order("delete", response_id, owner=owner_of(request.scope))
        return {"id": response_id, "object": "response", "deleted": True}

    @app.post(PATH + "/{response_id}/cancel")
    async def cancel_response(request: Request, response_id: str) -> Response:
        """Cancel a response that is being generated."""
        found = await service.responses.take_order("cancel", response_id, owner=owner_of(request.scope))
        status = found.status or json.loads(found.body)["status"]
        if status != "cancelled":
            raise InvalidRequestError(
                f"the response {response_id!r} is {status} and cannot be cancelled",
                code="response_not_cancellable",
                param="response_id",
            )
        return Response(found.body, media_type="application/json")

    _add_items(app, service)
    _add_count(app, service)
    return {PATH: create_response}


def _add_items(app: FastAPI, service: RouterService) -> None:
    @app.get(PATH + "/{response_id}/input_items")
    async def list_input_items(
        request: Request,
        response_id: str,
        after: str | None = None,
        limit: int = Query(20, ge=1, le=MAX_NUM_LISTED),
        order: Literal["asc", "desc"] = "desc",
    ) -> dict[str, Any]:
        """List the items of the conversation before a response, including those of earlier responses."""
        found = await service.responses.read(response_id, owner=owner_of(request.scope))
        return await page_of(found.items[:-1], after=after, limit=limit, order=order)


def _add_count(app: FastAPI, service: RouterService) -> None:
    model = with_fields_of(service.params, ResponsesBody)

    @app.post(PATH + "/input_tokens", openapi_extra=body_schema(model))
    async def count_input_tokens(request: Request, response: Response) -> dict[str, object]:
        """Count the tokens that the prompt of a response would have."""
        async with read_body(request, model, settings=service.settings, room=service.body_room) as body:
            with told_as(NAMES):
                service.check_model(body.model)
                conversation = await conversation_of(service, body, owner=owner_of(request.scope))
                chat = chat_of(body, conversation.items())
                ids = await encode(service, await render_chat(service, chat), add_special_tokens=False)
            response.headers.update(_ignored_header(service, body, chat))
            return {"object": "response.input_tokens", "input_tokens": len(ids)}


def _ignored_header(service: RouterService, body: ResponsesBody, chat: ChatBody) -> dict[str, str]:
    chat_only = {NAMES.get(name, name) for name in ignored_names(chat, service.chat_renderer.templates)}
    unkept = {"store"} if body.store and not service.responses.store.keeps_any else set()
    return names_header({*body.ignored(), *chat_only, *unkept})


async def _create(service: RouterService, request: Request, body: ResponsesBody) -> Response:
    store, owner = service.responses.store, owner_of(request.scope)
    conversation = await conversation_of(service, body, owner=owner)
    chat = chat_of(body, conversation.items())
    response_id = store.new_id()
    head, [output] = await start_chat(service, request, chat, answer_id=response_id)
    head = replace(head, grammar_param=own_name(head.grammar_param, NAMES))
    record = ResponseRecord(
        body=body,
        head=head,
        output=output,
        blocks=TurnBlocks(output),
        owner=owner,
        items=conversation.stored(response_id.rpartition("_")[2]),
        store=store,
    )
    answer = ResponseFormat(record)
    return RecordedResponse(
        [output],
        answer,
        stream=bool(body.stream),
        write_timeout_s=service.settings.write_timeout_s,
        headers=_ignored_header(service, body, chat),
        ending=answer.ending,
        record=record,
    )


class _RecordedChoice(Collected):
    """The choice of an unstreamed answer; its pieces also go to the record."""

    def __init__(self, output: TextOutput, record: ResponseRecord) -> None:
        super().__init__(output)
        self._record = record

    def add(self, piece: TextPiece) -> None:
        """Take one piece."""
        self.finish_reason = piece.finish_reason
        self._record.take(piece)


class RecordedResponse(GenerationResponse):
    """Registers the response with its record as long as it runs."""

    def __init__(self, *args: Any, record: ResponseRecord, **options: Any) -> None:
        super().__init__(*args, **options)
        self._record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        self._record.begin()
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._record.end()

    def _collected(self, output: TextOutput) -> Collected:
        return _RecordedChoice(output, self._record)
