"""Chat messages to a prompt, by the model's own Jinja template, in a sandbox and with Hugging Face's conventions."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.errors import InvalidRequestError, ModelDirectoryError
from router.text.tokenizer import read_json

_SPACES = "   "
"""More than a template adds by itself: one that leaves them keeps what a content ends with."""


class ChatTemplateError(InvalidRequestError):
    """The template refused the messages, or failed on them."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the chat template refused the messages: {reason}", code="chat_template", param="messages")


class NoChatTemplateError(InvalidRequestError):
    """The model has no chat template."""

    def __init__(self) -> None:
        super().__init__(
            "this model has no chat template, so /v1/chat/completions cannot be used with it; use /v1/completions",
            code="no_chat_template",
            param="messages",
        )


class _Raised(jinja2.TemplateError):
    """The template called raise_exception."""


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's tokens for training; when serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The tag's body, as if the tag were not there."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _raise_exception(message: str) -> NoReturn:
    raise _Raised(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelDirectoryError(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for a conversation, special tokens included.

        Raises:
            ChatTemplateError: The template refuses the conversation, or fails on it.
        """
        try:
            return self._template.render(
                **{
                    **self._special_tokens,
                    "tools": None,
                    "documents": None,
                    **(arguments or {}),
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except jinja2.TemplateError as error:
            raise ChatTemplateError(str(error)) from error
        except Exception as error:  # a template is a program: on odd input it can raise anything
            raise ChatTemplateError(f"{type(error).__name__}: {error}") from error

    def render_open(self, messages: Sequence[Mapping[str, Any]], *, arguments: Mapping[str, Any] | None = None) -> str:
        """The prompt for a conversation whose final message goes on: all that comes before the end of its content.

        A mark behind the content says where that is. Spaces at the content's end stay where the template keeps them.

        Raises:
            ChatTemplateError: The template refuses the conversation, or leaves the final message out.
        """
        final = messages[-1]
        content = str(final["content"])
        mark = str(secrets.randbits(128))

        def rendered(content: str) -> str:
            marked = [*messages[:-1], {**final, "content": content}]
            return self.render(marked, add_generation_prompt=False, arguments=arguments)

        text = rendered(content + mark + _SPACES)
        if content != content.rstrip() and mark + _SPACES not in text:
            text = rendered(content.rstrip() + mark)
        end = text.rfind(mark)
        if end < 0:
            raise ChatTemplateError("continue_final_message is set, but the final message is not in the rendered chat")
        return text[:end]


def load_chat_template(model_dir: Path, *, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """The template of a model directory: chat_template.jinja, chat_template.json, or tokenizer_config.json.

    Raises:
        ModelDirectoryError: A template is there and cannot be used.
    """
    source = _find_source(model_dir)
    return None if source is None else ChatTemplate(source, special_tokens=special_tokens)


def _find_source(model_dir: Path) -> str | None:
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelDirectoryError(f"cannot read {path}: {error}") from error
    for name in ("chat_template.json", "tokenizer_config.json"):
        value = read_json(model_dir / name).get("chat_template")
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
            if isinstance(default := named.get("default"), str):
                return default
            raise ModelDirectoryError(f"{model_dir / name} has several chat templates and none named 'default'")
    return None
