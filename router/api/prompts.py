"""From a body to prompt token ids: chats by the model's template, texts by the tokenizer, token ids as they are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol, cast

from router.api.chat_body import ChatBody, Message
from router.api.completion_body import CompletionBody
from router.errors import InvalidRequestError
from router.service import RouterService
from router.text.chat_template import ChatTemplateError, NoChatTemplateError

_LONG_TEXT_CHARACTERS = 20_000
"""Longer texts are tokenized in a thread: the tokenizer releases the GIL, and streams must not wait for it."""

_RESERVED_TEMPLATE_ARGUMENTS = frozenset({"messages", "add_generation_prompt", "tools", "documents", "chat_template"})


class ChatFields(Protocol):
    """The part of a body that says what conversation to render."""

    @property
    def messages(self) -> list[Message] | None:
        """The turns."""

    @property
    def add_generation_prompt(self) -> bool | None:
        """Whether the assistant's turn is begun."""

    @property
    def continue_final_message(self) -> bool | None:
        """Whether the last turn is left open."""

    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None:
        """More arguments of the template."""


async def chat_prompt(service: RouterService, body: ChatBody) -> tuple[int, ...]:
    """The prompt of a conversation.

    Raises:
        InvalidRequestError: There is no template, or it refuses the conversation.
    """
    text = render_chat(service, body)
    ids = await encode(service, text, add_special_tokens=False)
    return _checked(_truncated(ids, body.truncate_prompt_tokens), param="messages")


def render_chat(service: RouterService, body: ChatFields) -> str:
    """The conversation as the model reads it.

    Raises:
        InvalidRequestError: There is no template, or it refuses the conversation.
    """
    if service.chat_template is None:
        raise NoChatTemplateError
    assert body.messages
    goes_on = bool(body.continue_final_message)
    if goes_on and body.add_generation_prompt:
        raise InvalidRequestError(
            "add_generation_prompt and continue_final_message cannot both be true",
            code="invalid_parameter",
            param="continue_final_message",
        )
    arguments = body.chat_template_kwargs or {}
    if reserved := _RESERVED_TEMPLATE_ARGUMENTS.intersection(arguments):
        raise InvalidRequestError(
            f"chat_template_kwargs must not contain {', '.join(sorted(reserved))}",
            code="invalid_parameter",
            param="chat_template_kwargs",
        )
    messages = [_plain(message) for message in body.messages]
    add_prompt = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
    text = service.chat_template.render(messages, add_generation_prompt=add_prompt, arguments=arguments)
    return _without_end_of_turn(text, str(messages[-1]["content"])) if goes_on else text


async def completion_prompts(service: RouterService, body: CompletionBody) -> list[tuple[int, ...]]:
    """The prompts of a body, one or many.

    Raises:
        InvalidRequestError: A prompt is empty or holds ids that are no tokens of this model.
    """
    add_special_tokens = body.add_special_tokens is not False
    prompts: list[tuple[int, ...]] = []
    for item in _items(body.prompt):
        if isinstance(item, str):
            ids: Sequence[int] = await encode(service, item, add_special_tokens=add_special_tokens)
        else:
            ids = item
            _check_vocabulary(ids, service.vocab_size())
        prompts.append(_checked(_truncated(ids, body.truncate_prompt_tokens), param="prompt"))
    return prompts


def _items(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    """The prompts of a batch; one prompt is a batch of one."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return list(cast("list[str | list[int]]", prompt))


async def encode(service: RouterService, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text; a long one is tokenized in a thread."""
    if len(text) <= _LONG_TEXT_CHARACTERS:
        return service.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(service.tokenizer.encode, text, add_special_tokens=add_special_tokens)


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates expect it: plain text, and ``system`` for OpenAI's newer name of that role."""
    content = message.content
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _without_end_of_turn(text: str, final: str) -> str:
    """The prompt up to the end of the final message, which the model then continues."""
    final = final.strip()
    index = text.rfind(final)
    if not final or index < 0:
        raise ChatTemplateError("continue_final_message is set, but the final message is not in the rendered chat")
    return text[: index + len(final)]


def _truncated(ids: Sequence[int], limit: int | None) -> Sequence[int]:
    return ids if limit is None else ids[-limit:]


def _checked(ids: Sequence[int], *, param: str) -> tuple[int, ...]:
    if not ids:
        raise InvalidRequestError("the prompt has no tokens", code="empty_prompt", param=param)
    return tuple(ids)


def _check_vocabulary(ids: Sequence[int], vocab_size: int) -> None:
    largest = max(ids)
    if largest >= vocab_size:
        raise InvalidRequestError(
            f"token id {largest} is not in the model's vocabulary of {vocab_size} tokens",
            code="invalid_parameter",
            param="prompt",
        )
