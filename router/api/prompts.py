"""Makes prompt token ids from bodies: chats by the model's template, texts by the tokenizer, token ids unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from engine.contract.token_ids import TokenIds
from router.api.bodies.chat_body import ChatBody, Message
from router.api.bodies.completion_body import CompletionBody
from router.api.bodies.generate_body import GenerateBody
from router.api.http.value_bound import check_num_values
from router.api.output_limit import OutputLimit
from router.errors import ContextLengthError, InvalidRequestError
from router.service import RouterService
from router.text.chat_template import ChatTemplate, NoChatTemplateError
from router.text.tokenizer import Tokenizer

_LONG_TEXT_CHARACTERS = 4_000
"""Longer texts are tokenized in a thread, without the GIL, so that streams do not wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt as it is sent to the engine. ``text`` is the body's text, if the tokens are exactly that text's.

    ``text`` is None for a prompt that came as token ids, or that was truncated.
    """

    token_ids: TokenIds
    text: str | None = None

    def echo(self, tokenizer: Tokenizer) -> str:
        """The prompt's text, special tokens included."""
        return tokenizer.decode(self.token_ids, skip_special_tokens=False) if self.text is None else self.text


class ChatFields(Protocol):
    """The fields of a body that define the conversation to render."""

    @property
    def messages(self) -> list[Message] | None:
        """The turns."""

    @property
    def add_generation_prompt(self) -> bool | None:
        """Whether the prompt ends with the start of an assistant's turn."""

    @property
    def continue_final_message(self) -> bool | None:
        """Whether the model continues the last turn."""

    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None:
        """Further arguments of the template."""

    @property
    def read_fields(self) -> set[str]:
        """A set that collects the names of message fields that the template reads."""

    def template_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the template should render."""

    def template_parameters(self) -> dict[str, Any]:
        """Parameters of the body that some templates read."""


async def chat_prompt(service: RouterService, body: ChatBody, limit: OutputLimit) -> Prompt:
    """Render a conversation to a prompt, with its text.

    Raises:
        InvalidRequestError: There is no template, or it refuses the conversation.
    """
    text = await render_chat(service, body)
    _check_text_length(service, text, body, param="messages")
    ids = await encode(service, text, add_special_tokens=bool(body.add_special_tokens))
    return Prompt(token_ids=_checked(service, _truncated(service, ids, body, limit), param="messages"), text=text)


async def predicted_answer(service: RouterService, body: ChatBody) -> TokenIds | None:
    """The tokens of the answer that the body predicts; None if it predicts nothing.

    Raises:
        InvalidRequestError: No answer can be as long, or contain some of its tokens.
    """
    if body.prediction is None or not (text := body.prediction.text):
        return None
    max_model_len = service.max_model_len()
    num_tokens, ids = service.tokenizer.min_num_tokens(text), list[int]()
    if num_tokens <= max_model_len:
        ids = await encode(service, text, add_special_tokens=False)
        num_tokens = len(ids)
    if num_tokens > max_model_len:
        raise InvalidRequestError(
            f"the prediction has at least {num_tokens} tokens, but the model's context and thus an answer has at most "
            f"{max_model_len}: predict only the part of the answer that is most likely to come true",
            code="context_length_exceeded",
            param="prediction",
        )
    check_vocabulary(ids, service.vocab_size(), param="prediction")
    return TokenIds.of(ids)


def echoed_message(body: ChatBody) -> str:
    """The final message, if the answer should repeat it: it must be the assistant's, or be continued; else empty."""
    final = body.messages[-1]
    goes_on = bool(body.continue_final_message) or body.add_generation_prompt is False
    return final.text if body.echo and (goes_on or final.role == "assistant") else ""


async def render_chat(service: RouterService, body: ChatFields) -> str:
    """Render a conversation as the model reads it.

    Raises:
        InvalidRequestError: There is no template, or it refuses the conversation.
        TooManyValuesError: Parsing the arguments of calls would delay all other requests.
        QueueFullError: Too many long conversations are being rendered.
    """
    assert body.messages
    goes_on = bool(body.continue_final_message)
    if goes_on and body.add_generation_prompt:
        raise InvalidRequestError(
            "add_generation_prompt and continue_final_message cannot both be true: leave one out",
            code="invalid_parameter",
            param="continue_final_message",
        )
    templates = service.chat_renderer.templates
    if templates is None:
        raise NoChatTemplateError
    await _check_arguments(service, body.messages)
    tools = body.template_tools()
    template = templates.for_tools(tools)
    return await service.chat_renderer.render(
        [_plain(message, template, body.read_fields) for message in body.messages],
        add_generation_prompt=body.add_generation_prompt is not False,
        is_open=goes_on,
        arguments=_template_arguments(template, body),
        tools=tools,
    )


async def completion_prompts(service: RouterService, body: CompletionBody, limit: OutputLimit) -> list[Prompt]:
    """The prompts of a body, one or many.

    Raises:
        InvalidRequestError: There are too many prompts, or one is empty, certainly too long, or holds ids that are no
            tokens of this model.
    """
    items = _items(body.prompt)
    check_num_choices(service, body, num_prompts=len(items), param="prompt")
    texts = [item for item in items if isinstance(item, str)]
    for text in texts:
        _check_text_length(service, text, body, param="prompt")
    rows: Sequence[Sequence[int]]
    if texts:
        rows = await encode_all(service, texts, add_special_tokens=body.add_special_tokens is not False)
    else:
        rows = cast("list[list[int]]", items)
    prompts: list[Prompt] = []
    for item, ids in zip(items, rows, strict=True):
        kept = _checked(service, _truncated(service, ids, body, limit), param="prompt")
        prompts.append(Prompt(token_ids=kept, text=item if isinstance(item, str) and len(kept) == len(ids) else None))
    return prompts


def check_num_choices(service: RouterService, body: GenerateBody, *, num_prompts: int, param: str) -> None:
    """Refuse a body that asks for more answers than are allowed, or than can begin now, before any work is done for it.

    Raises:
        InvalidRequestError: It asks for more answers than are ever allowed.
        QueueFullError: Too many requests are in progress.
    """
    name, num_choices = ("best_of", body.best_of) if body.best_of else ("n", body.n or 1)
    if body.beam_width:
        name, num_choices = "beam_width", body.beam_width
    limit = service.settings.most_choices
    if num_prompts * num_choices > limit:
        prompts, make = ("1 prompt", "makes") if num_prompts == 1 else (f"{num_prompts} prompts", "make")
        raise InvalidRequestError(
            f"{prompts} with {name}={num_choices} {make} {num_prompts * num_choices} choices, the limit is {limit}",
            code="invalid_parameter",
            param=name if num_choices > 1 else param,
        )
    service.check_room(num_prompts * num_choices)


def _items(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    """The prompts of a batch; one prompt is a batch of one."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return list(cast("list[str | list[int]]", prompt))


async def encode(service: RouterService, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text; a long one is tokenized in a thread."""
    return (await encode_all(service, [text], add_special_tokens=add_special_tokens))[0]


async def encode_all(service: RouterService, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
    """Token ids of several texts; if their total length is large, they are tokenized in a thread."""
    if sum(map(len, texts)) <= _LONG_TEXT_CHARACTERS:
        return service.tokenizer.encode_all(texts, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(service.tokenizer.encode_all, texts, add_special_tokens=add_special_tokens)


async def _check_arguments(service: RouterService, messages: Sequence[Message]) -> None:
    """Bound the JSON values in the arguments of calls: in a body, each of these texts counts as one value only."""
    calls = [call for message in messages for call in message.tool_calls or ()]
    await check_num_values(
        [call.function.arguments.encode(errors="replace") for call in calls],
        max_body_values=service.settings.max_body_values,
        subject="the arguments of the calls in the conversation have",
    )


def _template_arguments(template: ChatTemplate, body: ChatFields) -> dict[str, Any]:
    """The given template arguments, and the body's parameters that the template reads by name."""
    arguments = dict(body.chat_template_kwargs or {})
    for name, value in body.template_parameters().items():
        if arguments.get(name, value) != value:
            raise InvalidRequestError(
                f"{name} is {value!r} and chat_template_kwargs.{name} is {arguments[name]!r}: send only one",
                code="invalid_parameter",
                param=name,
            )
        if template.reads(name):
            arguments[name] = value
    return arguments


def _plain(message: Message, template: ChatTemplate, read: set[str]) -> dict[str, Any]:
    """A message for the template. ``developer``, OpenAI's newer name, becomes ``system`` if the template lacks it."""
    joins_reasoning = bool(message.tool_calls) and template.takes_one_text_beside_calls
    plain = message.fields(read, joins_reasoning=joins_reasoning, as_parts=template.reads_parts)
    if message.role == "developer" and not template.names("developer"):
        plain["role"] = "system"
    return plain


def _truncated(service: RouterService, ids: Sequence[int], body: GenerateBody, limit: OutputLimit) -> Sequence[int]:
    """Truncate a prompt to its last or first tokens, to the length asked for; -1: to what leaves room."""
    num_kept = body.truncate_prompt_tokens
    if num_kept is None:
        return ids
    if num_kept == -1:
        num_kept = limit.num_prompt_tokens(max_model_len=service.max_model_len())
    return ids[:num_kept] if body.truncation_side == "right" else ids[-num_kept:]


def _checked(service: RouterService, ids: Sequence[int], *, param: str) -> TokenIds:
    """Check the prompt's token ids, and pack them in the form that goes to the engines' rows.

    A text may have tokens that the model lacks: added ones beyond its embeddings, for example of a multimodal variant.
    """
    if not ids:
        raise InvalidRequestError("the prompt has no tokens", code="empty_prompt", param=param)
    packed = TokenIds.of(ids)
    check_vocabulary(packed, service.vocab_size(), param=param, tokenizer=service.tokenizer)
    return packed


def _check_text_length(service: RouterService, text: str, body: GenerateBody, *, param: str) -> None:
    """Refuse a text that cannot fit, before it is tokenized, unless it should be truncated."""
    if body.truncate_prompt_tokens is not None:
        return
    num_tokens = service.tokenizer.min_num_tokens(text)
    max_model_len = service.max_model_len()
    if num_tokens >= max_model_len:
        raise ContextLengthError(
            num_prompt_tokens=num_tokens, max_model_len=max_model_len, max_tokens=None, param=param, is_at_least=True
        )


def check_vocabulary(ids: Sequence[int], vocab_size: int, *, param: str, tokenizer: Tokenizer | None = None) -> None:
    """Refuse token ids that the model does not have. With a ``tokenizer`` the error shows the token's text.

    Raises:
        InvalidRequestError: There are some; the message names the largest.
    """
    if not ids:
        return
    largest = int(ids.array.max()) if isinstance(ids, TokenIds) else max(ids)
    if largest >= vocab_size:
        spelling = tokenizer.token_strings([largest])[0] if tokenizer is not None else None
        raise InvalidRequestError(
            f"the parameter '{param}' is invalid: token id {largest}{f' ({spelling})' if spelling else ''} is not in "
            f"the model's vocabulary of {vocab_size} tokens",
            code="invalid_parameter",
            param=param,
        )
