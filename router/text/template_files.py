"""Loads the chat templates of a model directory: one for all conversations, or another one for those with tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from router.errors import ModelDirectoryError
from router.text.chat_template import MAX_RENDERED_CHARACTERS, ChatTemplate
from router.text.tokenizer import read_json

DEFAULT: Final = "default"
TOOL_USE: Final = "tool_use"
"""The names of the two templates in transformers and vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplates:
    """The templates of a model; ``tool_use`` is for conversations with tools, None if ``default`` serves all."""

    default: ChatTemplate
    tool_use: ChatTemplate | None = None

    @property
    def with_tools(self) -> ChatTemplate:
        """The template that renders tools."""
        return self.tool_use or self.default

    def for_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate:
        """The template for a conversation with these tools."""
        return self.with_tools if tools else self.default


def load_chat_templates(
    model_dir: Path, *, special_tokens: Mapping[str, str], max_characters: int = MAX_RENDERED_CHARACTERS
) -> ChatTemplates | None:
    """The templates of a model directory; None if it has none.

    The default template is in chat_template.jinja, chat_template.json, or tokenizer_config.json. The one for tools is
    in additional_chat_templates, or beside the default one in one of the two JSON files.

    Raises:
        ModelDirectoryError: A template exists and cannot be used.
    """

    def compiled(source: str) -> ChatTemplate:
        return ChatTemplate(source, special_tokens=special_tokens, max_characters=max_characters)

    sources = _sources(model_dir)
    if not sources:
        return None
    tool_use = sources.get(TOOL_USE)
    return ChatTemplates(default=compiled(sources[DEFAULT]), tool_use=None if tool_use is None else compiled(tool_use))


def _sources(model_dir: Path) -> dict[str, str]:
    """The templates' source texts by name; if there are any, one is the default."""
    own = _text(model_dir / "chat_template.jinja")
    sources = _in_json(model_dir) if own is None else {DEFAULT: own}
    tool_use = _text(model_dir / "additional_chat_templates" / f"{TOOL_USE}.jinja")
    if not sources and tool_use is not None:
        raise ModelDirectoryError(f"{model_dir} has a chat template named {TOOL_USE!r} and none named {DEFAULT!r}")
    return sources if tool_use is None else {**sources, TOOL_USE: tool_use}


def _in_json(model_dir: Path) -> dict[str, str]:
    for name in ("chat_template.json", "tokenizer_config.json"):
        value = read_json(model_dir / name).get("chat_template")
        if isinstance(value, str):
            return {DEFAULT: value}
        if isinstance(value, list):
            named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
            found = {key: text for key in (DEFAULT, TOOL_USE) if isinstance(text := named.get(key), str)}
            if DEFAULT not in found:
                raise ModelDirectoryError(f"{model_dir / name} has several chat templates and none named {DEFAULT!r}")
            return found
    return {}


def _text(path: Path) -> str | None:
    """The file's text; None if there is no such file."""
    if not path.is_file():
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelDirectoryError(f"cannot read {path}: {error}") from error
