"""The files in a model's directory that have its chat templates, and the purpose of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.errors import ModelDirectoryError
from router.text.template_files import ChatTemplates, load_chat_templates

MESSAGES = [{"role": "user", "content": "Hi"}]
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "stop"}}]


def write(path: Path, content: dict[str, object] | str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def loaded(path: Path) -> ChatTemplates:
    templates = load_chat_templates(path, special_tokens={})
    assert templates is not None
    return templates


def both(templates: ChatTemplates) -> tuple[str, str]:
    """The rendered chat without tools, and with some."""
    plain, with_tools = templates.for_tools(None), templates.for_tools(TOOLS)
    return plain.render(MESSAGES), with_tools.render(MESSAGES, tools=TOOLS)


def several(**templates: str) -> dict[str, object]:
    return {"chat_template": [{"name": name, "template": text} for name, text in templates.items()]}


def test_one_template_is_for_all_conversations(tmp_path: Path) -> None:
    write(tmp_path / "tokenizer_config.json", {"chat_template": "config"})

    assert both(loaded(tmp_path)) == ("config", "config")


def test_file_of_its_own_comes_before_the_tokenizer_config(tmp_path: Path) -> None:
    write(tmp_path / "tokenizer_config.json", several(default="config", tool_use="tools of the config"))
    write(tmp_path / "chat_template.jinja", "file")

    assert both(loaded(tmp_path)) == ("file", "file")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.json"])
def test_of_several_templates_the_default_is_taken_and_that_for_tools(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, several(rag="R", tool_use="T", default="D"))

    assert both(loaded(tmp_path)) == ("D", "T")


@pytest.mark.parametrize("default", ["chat_template.jinja", "tokenizer_config.json"])
def test_template_for_tools_may_have_a_file_of_its_own(tmp_path: Path, default: str) -> None:
    write(tmp_path / default, "D" if default.endswith(".jinja") else {"chat_template": "D"})
    write(tmp_path / "additional_chat_templates" / "tool_use.jinja", "T")
    write(tmp_path / "additional_chat_templates" / "rag.jinja", "R")

    assert both(loaded(tmp_path)) == ("D", "T")


def test_file_for_tools_comes_before_the_tokenizer_config(tmp_path: Path) -> None:
    write(tmp_path / "tokenizer_config.json", several(default="D", tool_use="old"))
    write(tmp_path / "additional_chat_templates" / "tool_use.jinja", "T")

    assert both(loaded(tmp_path)) == ("D", "T")


def test_directory_without_template_has_none(tmp_path: Path) -> None:
    assert load_chat_templates(tmp_path, special_tokens={}) is None


def test_template_for_tools_alone_is_refused_at_start(tmp_path: Path) -> None:
    write(tmp_path / "tokenizer_config.json", several(tool_use="T"))
    (tmp_path / "file").mkdir()
    write(tmp_path / "file" / "additional_chat_templates" / "tool_use.jinja", "T")

    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(ModelDirectoryError, match="none named 'default'"):
            load_chat_templates(path, special_tokens={})


@pytest.mark.parametrize("name", ["default", "tool_use"])
def test_template_with_a_syntax_error_is_refused_at_start(tmp_path: Path, name: str) -> None:
    write(tmp_path / "tokenizer_config.json", several(**{"default": "D", "tool_use": "T", name: "{% if %}"}))

    with pytest.raises(ModelDirectoryError, match="does not compile"):
        load_chat_templates(tmp_path, special_tokens={})
