"""Whole answers that tell much of their tokens are written so that others' streams go on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from router.text.token_spelling import Spelling, TokenSpeller
from tests.support.router.router_rig import RouterRig, events, router_rig

NUM_CHOICES, NUM_TOKENS, NUM_TOP = 2, 100, 20
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": NUM_TOP},
    TEXT: {"prompt": "hi", "logprobs": NUM_TOP},
}


class WatchedSpeller(TokenSpeller):
    """Spells as another one does, and counts how often in which thread."""

    def __init__(self, own: TokenSpeller) -> None:
        self._own = own
        self.num_spelt: dict[int, int] = {}

    def spell(self, token_id: int) -> Spelling:
        """See ``TokenSpeller``."""
        thread = threading.get_ident()
        self.num_spelt[thread] = self.num_spelt.get(thread, 0) + 1
        return self._own.spell(token_id)

    @property
    def num_on_loop(self) -> int:
        """How many tokens were spelt where the event loop runs, which is the test's own thread."""
        return self.num_spelt.get(threading.get_ident(), 0)


def watched(rig: RouterRig) -> WatchedSpeller:
    """Puts itself in the place of the router's speller."""
    speller = rig.service.speller = WatchedSpeller(rig.service.speller)
    return speller


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_large_whole_answers_are_written_beside_the_event_loop(model_dir: Path, path: str) -> None:
    async with router_rig(model_dir) as rig:
        speller = watched(rig)
        body = {**BODIES[path], "n": NUM_CHOICES, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        choices = (await rig.client.post(path, json=body)).json()["choices"]

    told = [choice["logprobs"]["content" if path == CHAT else "tokens"] for choice in choices]
    assert [len(entries) for entries in told] == [NUM_TOKENS] * NUM_CHOICES
    assert speller.num_on_loop == 0
    assert sum(speller.num_spelt.values()) >= NUM_CHOICES * NUM_TOKENS * NUM_TOP


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("fields", [{"max_tokens": 5}, {"max_tokens": NUM_TOKENS, "stream": True}])
async def test_small_answers_and_streams_need_no_thread(model_dir: Path, path: str, fields: dict[str, Any]) -> None:
    async with router_rig(model_dir) as rig:
        speller = watched(rig)
        response = await rig.client.post(path, json={**BODIES[path], **fields})

    assert response.status_code == 200
    assert speller.num_on_loop == sum(speller.num_spelt.values()) > 0


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_large_whole_answer_tells_what_a_stream_does(model_dir: Path, path: str) -> None:
    body = {**BODIES[path], "max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 1}
    kind = "content" if path == CHAT else "top_logprobs"

    async with router_rig(model_dir) as rig:
        whole = (await rig.client.post(path, json=body)).json()
        streamed = events(await rig.client.post(path, json={**body, "stream": True}))

    pieces = [choice["logprobs"] for event in streamed for choice in event["choices"] if choice["logprobs"]]
    assert whole["choices"][0]["logprobs"][kind] == [entry for piece in pieces for entry in piece[kind]]


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
async def test_a_response_writes_each_token_once_however_often_it_is_told(
    model_dir: Path, fields: dict[str, Any]
) -> None:
    body = {"input": "hi", "top_logprobs": NUM_TOP, "max_output_tokens": NUM_TOKENS, "ignore_eos": True, **fields}

    async with router_rig(model_dir) as rig:
        speller = watched(rig)
        response = await rig.client.post("/v1/responses", json=body)

    assert response.status_code == 200
    assert response.text.count('"top_logprobs": [') >= NUM_TOKENS
    assert speller.num_spelt == {threading.get_ident(): NUM_TOKENS * (1 + NUM_TOP)}
