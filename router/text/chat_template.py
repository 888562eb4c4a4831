"""Renders chat messages to a prompt by the model's Jinja template, sandboxed, with Hugging Face's conventions."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from router.errors import InvalidRequestError, ModelDirectoryError
from router.text.template_bounds import MAX_STEPS, BoundedEnvironment, Budget, TemplateLimitError

MAX_RENDERED_CHARACTERS = 8 * 1024 * 1024
"""Default bound: as many characters as a body may have bytes by default."""

_RESERVED = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"),
        *(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")),
        "additional_special_tokens",
        *("self", "super", "loop", "caller", "varargs", "kwargs"),
    }
)
"""Names that callers may not set, besides the model's special tokens and the sandbox's globals."""

REASONING_FIELDS = ("reasoning", "reasoning_content", "thinking")
"""What templates call the thinking of an earlier turn; ``thinking`` is gpt-oss's word."""

_PROBE = "probe of a text"

_SPACES = "   "
"""More spaces than a template adds itself: if they survive, the template keeps a content's trailing spaces."""


class ChatTemplateError(InvalidRequestError):
    """The template refused the messages, or failed on them."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the chat template refused the messages: {reason}", code="chat_template", param="messages")


class ReservedArgumentError(InvalidRequestError):
    """``chat_template_kwargs`` names a variable that the model or the conversation supplies to the template."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(
            f"chat_template_kwargs must not contain {', '.join(sorted(names))}: the template gets "
            f"{'this' if len(names) == 1 else 'these'} from the model or from the conversation",
            code="invalid_parameter",
            param="chat_template_kwargs",
        )


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


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled chat template. ``reserved`` are the names whose values callers may not set.

    ``max_characters`` bounds its result. From that follow bounds on the memory and time of a rendering, which hold for
    any values that a caller sends (``Budget``). Renderings may run in several threads at once.
    """

    def __init__(
        self, source: str, *, special_tokens: Mapping[str, str], max_characters: int = MAX_RENDERED_CHARACTERS
    ) -> None:
        self._environment = _environment()
        self._max_characters = max_characters
        try:
            self._template = self._environment.from_string(source)
            tree = self._environment.parse(source)
        except jinja2.TemplateError as error:
            raise ModelDirectoryError(f"the chat template does not compile: {error}") from error
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._words = frozenset(node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))
        # After the words were collected: this call folds lists of words into one constant.
        self._variables = frozenset(meta.find_undeclared_variables(tree))
        self.reserved = _RESERVED.union(self._environment.globals, special_tokens)

    def reads(self, variable: str) -> bool:
        """True if an argument of this name can change the result."""
        return variable in self._variables

    def names(self, word: str) -> bool:
        """True if a word, such as the name of a role, occurs in the template."""
        return word in self._words

    @functools.cached_property
    def reads_parts(self) -> bool:
        """True if a content must be a list of parts: some templates, such as Llama Guard's, loop over it and find no
        text in a string. Templates that accept both get a string.
        """
        return not self._shows(_PROBE) and self._shows([{"type": "text", "text": _PROBE}])

    def _shows(self, content: object) -> bool:
        try:
            return _PROBE in self.render([{"role": "user", "content": content}])
        except ChatTemplateError:
            return False

    @functools.cached_property
    def takes_one_text_beside_calls(self) -> bool:
        """True if a turn with tool calls may have thinking or content but not both, as with gpt-oss's template."""
        if "thinking" not in self.source or "raise_exception" not in self.source:
            return False
        return self._renders_call("text", thinking="") and not self._renders_call("text", thinking="thought")

    def _renders_call(self, content: str, *, thinking: str) -> bool:
        call = {"id": "call1", "type": "function", "function": {"name": "name", "arguments": {}}}
        turn = {"role": "assistant", "content": content, "tool_calls": [call]}
        try:
            self.render([{"role": "user", "content": "text"}, turn | dict.fromkeys(REASONING_FIELDS, thinking)])
        except ChatTemplateError:
            return False
        return True

    def budget(self, *, max_steps: int = MAX_STEPS) -> Budget:
        """What one rendering may spend."""
        return Budget(max_characters=self._max_characters, max_steps=max_steps)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
        budget: Budget | None = None,
    ) -> str:
        """Render the prompt for a conversation, special tokens included. ``tools`` is OpenAI's parameter.

        Raises:
            ReservedArgumentError: An argument has a reserved name.
            ChatTemplateError: The template refuses the conversation, or fails on it.
            TemplateLimitError: It exceeded the ``budget`` that was given.
        """
        if reserved := self.reserved.intersection(arguments or {}):
            raise ReservedArgumentError(reserved)
        try:
            with self._environment.spending(budget or self.budget()):
                return self._template.render(
                    **{
                        "documents": None,
                        **(arguments or {}),
                        **self._special_tokens,
                        "messages": messages,
                        "tools": tools,
                        "add_generation_prompt": add_generation_prompt,
                    }
                )
        except TemplateLimitError as error:
            if budget is not None:
                raise
            raise ChatTemplateError(str(error)) from error
        except jinja2.TemplateError as error:
            raise ChatTemplateError(str(error)) from error
        except Exception as error:  # a template is a program: on odd input it can raise anything
            raise ChatTemplateError(f"{type(error).__name__}: {error}") from error

    def render_open(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
        budget: Budget | None = None,
    ) -> str:
        """Render a prompt whose final message the model continues: everything up to the end of that message's content.

        A mark after the content finds that position. Spaces at the content's end stay if the template keeps them.

        Raises:
            ReservedArgumentError, TemplateLimitError: As for ``render``.
            ChatTemplateError: The template refuses the conversation, or leaves the final message out.
        """
        final = messages[-1]
        *before, last = final["content"] if isinstance(final["content"], list) else [final["content"]]
        content = str(last["text"] if isinstance(last, dict) else last)
        mark = str(secrets.randbits(128))

        def rendered(content: str) -> str:
            marked_content = [*before, {**last, "text": content}] if isinstance(last, dict) else content
            marked = [*messages[:-1], {**final, "content": marked_content}]
            return self.render(marked, add_generation_prompt=False, tools=tools, arguments=arguments, budget=budget)

        text = rendered(content + mark + _SPACES)
        if content != content.rstrip() and mark + _SPACES not in text:
            text = rendered(content.rstrip() + mark)
        end = text.rfind(mark)
        if end < 0:
            raise ChatTemplateError("continue_final_message is set, but the final message is not in the rendered chat")
        return text[:end]
