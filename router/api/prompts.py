"""From a body to prompt token ids: chats by the model's template, texts by the tokenizer, token ids as they are."""

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
"""Longer texts are tokenized in a thread, without the GIL: streams must not wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt as it is sent to the engine; ``text`` is the body's own, None where those tokens are not its tokens.

    A text that the body gave as token ids, or that was truncated, is known by its tokens alone.
    """

    token_ids: TokenIds
    text: str | None = None

    def echo(self, tokenizer: Tokenizer) -> str:
        """The prompt's text, special tokens included."""
        return tokenizer.decode(self.token_ids, skip_special_tokens=False) if self.text is None else self.text


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

    @property
    def read_fields(self) -> set[str]:
        """Takes the names of the fields of messages that the template reads."""

    def template_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the template is to tell of."""

    def template_parameters(self) -> dict[str, Any]:
        """Parameters of the body that some templates read."""


async def chat_prompt(service: RouterService, body: ChatBody, limit: OutputLimit) -> Prompt:
    """The prompt of a conversation, with its text as rendered.

    Raises:
        InvalidRequestError: There is no template, or it refuses the conversation.
    """
    text = await render_chat(service, body)
    _check_text_length(service, text, body, param="messages")
    ids = await encode(service, text, add_special_tokens=bool(body.add_special_tokens))
    return Prompt(token_ids=_checked(service, _truncated(service, ids, body, limit), param="messages"), text=text)


async def predicted_answer(service: RouterService, body: ChatBody) -> TokenIds | None:
    """What the body predicts of the answer; None where it predicts nothing.

    Raises:
        InvalidRequestError: No answer can be as long, or say some of its tokens.
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
            f"the prediction has at least {num_tokens} tokens, and no answer has more than the {max_model_len} of the "
            "model's context: predict the part of the answer that changes least",
            code="context_length_exceeded",
            param="prediction",
        )
    check_vocabulary(ids, service.vocab_size(), param="prediction")
    return TokenIds.of(ids)


def echoed_message(body: ChatBody) -> str:
    """The final message where the answer is to repeat it: one of the speaker who goes on."""
    final = body.messages[-1]
    goes_on = bool(body.continue_final_message) or body.add_generation_prompt is False
    return final.text if body.echo and (goes_on or final.role == "assistant") else ""


async def render_chat(service: RouterService, body: ChatFields) -> str:
    """The conversation as the model reads it.

    Raises:
        InvalidRequestError: There is no template, or it refuses the conversation.
        TooManyValuesError: Parsing the arguments of calls would hold up everybody else.
        QueueFullError: Too many long conversations are being rendered.
    """
    assert body.messages
    goes_on = bool(body.continue_final_message)
    if goes_on and body.add_generation_prompt:
        raise InvalidRequestError(
            "add_generation_prompt and continue_final_message cannot both be true",
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
    """Refuse a body that asks for more answers than allowed, or than can begin now, before anything is done for it.

    Raises:
        InvalidRequestError: It asks for more than are ever allowed.
        QueueFullError: Too many are in progress.
    """
    name, num_choices = ("best_of", body.best_of) if body.best_of else ("n", body.n or 1)
    if body.beam_width:
        name, num_choices = "beam_width", body.beam_width
    if num_prompts * num_choices > service.settings.max_num_choices:
        raise InvalidRequestError(
            f"{num_prompts} prompts with {name}={num_choices} are {num_prompts * num_choices} choices, "
            f"the limit is {service.settings.max_num_choices}",
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
    """Token ids of several texts; if they are long together, they are tokenized in a thread."""
    if sum(map(len, texts)) <= _LONG_TEXT_CHARACTERS:
        return service.tokenizer.encode_all(texts, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(service.tokenizer.encode_all, texts, add_special_tokens=add_special_tokens)


async def _check_arguments(service: RouterService, messages: Sequence[Message]) -> None:
    """To a body the arguments of a call are one value, a text, whatever that has."""
    calls = [call for message in messages for call in message.tool_calls or ()]
    await check_num_values(
        [call.function.arguments.encode(errors="replace") for call in calls],
        max_body_values=service.settings.max_body_values,
        subject="the arguments of the calls in the conversation have",
    )


def _template_arguments(template: ChatTemplate, body: ChatFields) -> dict[str, Any]:
    """The arguments given, with the parameters that the template reads under their own names."""
    arguments = dict(body.chat_template_kwargs or {})
    for name, value in body.template_parameters().items():
        if arguments.get(name, value) != value:
            raise InvalidRequestError(
                f"{name} is {value!r} and chat_template_kwargs.{name} is {arguments[name]!r}: give one",
                code="invalid_parameter",
                param=name,
            )
        if template.reads(name):
            arguments[name] = value
    return arguments


def _plain(message: Message, template: ChatTemplate, read: set[str]) -> dict[str, Any]:
    """A message as templates expect it: ``developer``, OpenAI's newer name, is ``system`` to one that never says it."""
    joins_reasoning = bool(message.tool_calls) and template.takes_one_text_beside_calls
    plain = message.fields(read, joins_reasoning=joins_reasoning, as_parts=template.reads_parts)
    if message.role == "developer" and not template.names("developer"):
        plain["role"] = "system"
    return plain


def _truncated(service: RouterService, ids: Sequence[int], body: GenerateBody, limit: OutputLimit) -> Sequence[int]:
    """The last or the first tokens of a prompt, as many as asked for; -1 asks for as many as leave room."""
    num_kept = body.truncate_prompt_tokens
    if num_kept is None:
        return ids
    if num_kept == -1:
        num_kept = limit.num_prompt_tokens(max_model_len=service.max_model_len())
    return ids[:num_kept] if body.truncation_side == "right" else ids[-num_kept:]


def _checked(service: RouterService, ids: Sequence[int], *, param: str) -> TokenIds:
    """The prompt, packed as it goes from here to the engines' rows.

    A text may hold tokens that the model has not: added ones behind its embeddings, as of a variant with pictures.
    """
    if not ids:
        raise InvalidRequestError("the prompt has no tokens", code="empty_prompt", param=param)
    packed = TokenIds.of(ids)
    check_vocabulary(packed, service.vocab_size(), param=param, tokenizer=service.tokenizer)
    return packed


def _check_text_length(service: RouterService, text: str, body: GenerateBody, *, param: str) -> None:
    """Refuse a text that cannot fit before it is tokenized, unless it is to be cut."""
    if body.truncate_prompt_tokens is not None:
        return
    num_tokens = service.tokenizer.min_num_tokens(text)
    max_model_len = service.max_model_len()
    if num_tokens >= max_model_len:
        raise ContextLengthError(
            num_prompt_tokens=num_tokens, max_model_len=max_model_len, max_tokens=None, param=param, is_at_least=True
        )


def check_vocabulary(ids: Sequence[int], vocab_size: int, *, param: str, tokenizer: Tokenizer | None = None) -> None:
    """Refuse token ids that the model does not have. A ``tokenizer`` says how the text has such a one.

    Raises:
        InvalidRequestError: There are some; it names the largest.
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
