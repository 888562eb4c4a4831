"""Texts of models and other callers cannot control the terminal of whoever looks at them."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from cluster.cli import app
from cluster.client import for_terminal, shown
from cluster.commands.clients.chat import print_answer
from tests.support.router.live_app import live_app
from tests.support.router.router_rig import router_rig
from tests.support.router.router_tokenizer import write_model_dir

TITLE = "\x1b]0;mine\x07"
CLEAR = "\x9b2J"
TURNED = "\u202egnp.exe"


async def baton(*words: str) -> Result:
    return await asyncio.to_thread(CliRunner(env={"COLUMNS": "200"}).invoke, app, words)


@pytest.mark.parametrize("text", [TITLE, CLEAR, TURNED, "a\rb", "a\x08b", "\x00"])
def test_what_steers_is_shown_by_its_number(text: str) -> None:
    assert for_terminal(text).isprintable()


def test_other_texts_are_shown_as_they_are() -> None:
    text = "def f():\n\treturn 'naïve 日本 👩‍👩‍👧 שלום'"

    assert for_terminal(text) == text
    assert shown({"a": [text, 1, None, True]}) == {"a": [text, 1, None, True]}


def test_answer_in_a_chat_does_not_steer_the_terminal() -> None:
    console = Console(file=(written := io.StringIO()), force_terminal=True, width=80)

    answer = print_answer(["Hi ", TITLE, CLEAR, "you\n"], console)

    assert answer == f"Hi {TITLE}{CLEAR}you\n"
    assert written.getvalue() == "Hi \\x1b]0;mine\\x07\\x9b2Jyou\n\n"


@pytest.mark.parametrize("options", [[], ["--json"]])
async def test_trace_of_anothers_request_does_not_steer_the_terminal(tmp_path: Path, options: list[str]) -> None:
    async with router_rig(write_model_dir(tmp_path)) as rig, live_app(rig.app) as url:
        refused = await rig.complete("hello", **{TITLE + CLEAR: 1})
        result = await baton("trace", refused.headers["x-request-id"], "--url", url, *options)

    assert result.exit_code == 0
    assert "unknown parameter" in result.stdout
    assert not set(result.stdout) & {"\x1b", "\x07", "\x9b"}
