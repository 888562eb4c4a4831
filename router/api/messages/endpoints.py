"""/v1/messages: create a message, and count the tokens of a conversation."""

from __future__ import annotations

import uuid
from dataclasses import replace

from fastapi import FastAPI, Request, Response

from router.api.answers.sse import GenerationResponse
from router.api.answers.turn_blocks import TurnBlocks
from router.api.bodies.chat_body import ChatBody
from router.api.bodies.processor_fields import with_fields_of
from router.api.completions import start_chat
from router.api.errors import MESSAGES_PATH
from router.api.http.direct_routes import Endpoint
from router.api.http.request_body import read_body
from router.api.ignored import ignored_names, names_header
from router.api.messages.body import CountTokensBody, MessagesBody
from router.api.messages.message_format import MessageFormat
from router.api.messages.to_chat import NAMES, chat_of
from router.api.openapi import body_schema
from router.api.prompts import encode, render_chat
from router.api.told_as import own_name, told_as
from router.service import RouterService


def add_messages(app: FastAPI, service: RouterService) -> dict[str, Endpoint]:
    """Add the endpoints.

    Returns:
        The endpoints that generate, by path.
    """
    model = with_fields_of(service.params, MessagesBody)

    @app.post(MESSAGES_PATH, openapi_extra=body_schema(model))
    async def create_message(request: Request) -> Response:
        """Continue a conversation."""
        async with read_body(request, model, settings=service.settings, room=service.body_room) as body:
            with told_as(NAMES):
                return await _create(service, request, body)

    @app.post(MESSAGES_PATH + "/count_tokens", openapi_extra=body_schema(CountTokensBody))
    async def count_tokens(request: Request, response: Response) -> dict[str, int]:
        """Count the tokens of a conversation's prompt."""
        async with read_body(request, CountTokensBody, settings=service.settings, room=service.body_room) as body:
            with told_as(NAMES):
                service.check_model(body.model)
                chat = _chat_of(service, body)
                text = await render_chat(service, chat)
                ids = await encode(service, text, add_special_tokens=False)
            response.headers.update(names_header({*body.ignored(), *_ignored_in_chat(service, chat)}))
            return {"input_tokens": len(ids)}

    return {MESSAGES_PATH: create_message}


def _chat_of(service: RouterService, body: MessagesBody | CountTokensBody) -> ChatBody:
    thinks = service.reasoning_format is not None
    return chat_of(body, thinks=thinks, templates=service.chat_renderer.templates)


def _ignored_in_chat(service: RouterService, chat: ChatBody) -> set[str]:
    """The chat's parameters without effect, by this endpoint's names."""
    return {NAMES.get(name, name) for name in ignored_names(chat, service.chat_renderer.templates)}


async def _create(service: RouterService, request: Request, body: MessagesBody) -> Response:
    chat = _chat_of(service, body)
    head, [output] = await start_chat(service, request, chat, answer_id=f"msg_{uuid.uuid4().hex}")
    head = replace(head, grammar_param=own_name(head.grammar_param, NAMES))
    answer = MessageFormat(head, TurnBlocks(output))
    return GenerationResponse(
        [output],
        answer,
        stream=bool(body.stream),
        write_timeout_s=service.settings.write_timeout_s,
        headers=names_header({*body.ignored(), *_ignored_in_chat(service, chat)}),
        ending=answer.ending,
    )
