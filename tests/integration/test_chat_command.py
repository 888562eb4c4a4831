"""`baton chat` with the built-in model, behind a real router over a prefill and a decode engine."""

from __future__ import annotations

import asyncio
import io

import pytest
from rich.console import Console

from cluster.commands.clients.chat import LEFT_OUT, chat
from cluster.config.served_model import BUILTIN_QUESTION
from engine.model.builtin import builtin_model_dir
from tests.support.router.model_router import model_router


async def test_conversation_is_answered_from_kv_that_was_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{BUILTIN_QUESTION}\nWhat is 47 + 35?\n\n"))
    console = Console(file=io.StringIO(), width=200)
    async with model_router(builtin_model_dir()) as router:
        url = str(router.client.base_url).removesuffix("/v1/")

        await asyncio.to_thread(chat, url, console)

        assert router.service.counters.num_finished == 2
        assert (router.prefill_load().counters["num_finished"], router.decode_load().counters["num_finished"]) == (2, 2)
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    assert said.startswith("Talking to tiny.")
    assert "The code of the blue fox is 4827." in said
    assert "47 + 35 = 82." in said


async def test_conversation_that_outgrows_the_context_goes_on_without_its_oldest_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long = "The code of the blue fox is 4827. " * 30
    lines = [*[long] * 6, "/help", "/new", "What is 47 + 35?", "/exit", "What is 1 + 1?"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    console = Console(file=io.StringIO(), width=200)
    async with model_router(builtin_model_dir()) as router:
        await asyncio.to_thread(chat, str(router.client.base_url).removesuffix("/v1/"), console)

        assert router.service.counters.num_finished == 7
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    assert LEFT_OUT in said
    assert "/new starts a new conversation" in said
    assert "47 + 35 = 82." in said
