"""What a beam search can be asked for: what goes beside it, what does not, and what its choices say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.parity.setup import FULL
from tests.support.parity.world import World, world
from tests.support.router.router_rig import RouterRig, router_rig

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
SEARCH: dict[str, Any] = {"use_beam_search": True, "beam_width": 3}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({**SEARCH, "stream": True}, "stream"),
    ({**SEARCH, "temperature": 0.7}, "temperature"),
    ({**SEARCH, "stop": "x"}, "stop"),
    ({**SEARCH, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({**SEARCH, "allowed_token_ids": [5, 6, 7, 8, 9, 9]}, "allowed_token_ids"),
    ({**SEARCH, "response_format": {"type": "json_object"}}, "response_format"),
    ({**SEARCH, "structured_outputs": {"regex": "a+"}}, "structured_outputs"),
    ({**SEARCH, "guided_choice": ["a", "b"]}, "guided_choice"),
    ({**SEARCH, "n": 4}, "beam_width"),
    ({**SEARCH, "best_of": 4}, "best_of"),
    ({**SEARCH, "length_penalty": 6}, "length_penalty"),
    ({**SEARCH, "early_stopping": "soon"}, "early_stopping"),
    ({"use_beam_search": True}, "n"),
    ({"use_beam_search": True, "n": 3, "best_of": 2}, "best_of"),
    ({"beam_width": 1}, "beam_width"),
    ({"beam_width": 100_000}, "beam_width"),
    ({"use_beam_search": False, "beam_width": 3}, "beam_width"),
    ({"length_penalty": 0.5}, "length_penalty"),
    ({"early_stopping": True}, "early_stopping"),
]


@pytest.fixture
async def rig(model_dir: Path) -> AsyncIterator[RouterRig]:
    async with router_rig(model_dir) as rig:
        yield rig


@pytest.mark.parametrize(("fields", "param"), REFUSED)
@pytest.mark.parametrize("url", [TEXT, CHAT])
async def test_what_does_not_go_with_a_search_is_named(
    rig: RouterRig, url: str, fields: dict[str, Any], param: str
) -> None:
    body = {"prompt": "hi"} if url == TEXT else {"messages": MESSAGES}

    response = await rig.client.post(url, json={**body, **fields})

    assert response.status_code == 400
    assert response.json()["error"]["param"].split(".")[0] == param
    assert not rig.decode.submitted
    assert not rig.prefill.submitted


@pytest.mark.parametrize(
    ("url", "body"),
    [(TEXT, {"prompt": "hi", "logprobs": 0}), (CHAT, {"messages": MESSAGES, "logprobs": True})],
)
async def test_log_probabilities_of_tokens_are_refused(rig: RouterRig, url: str, body: dict[str, Any]) -> None:
    response = await rig.client.post(url, json={**body, **SEARCH})

    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "logprobs")
    assert "cumulative_logprob" in error["message"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    async with world(FULL.write(tmp_path_factory.mktemp("beams") / "model")) as made:
        yield made


@pytest.mark.asyncio(loop_scope="module")
async def test_best_outputs_come_first_and_only_they_count(served: World) -> None:
    body = {"prompt": "on your marks", "max_tokens": 7, "use_beam_search": True, "best_of": 4, "length_penalty": 0.5}

    answer = await served.post(TEXT, {**body, "n": 3, "return_token_ids": True})

    choices = answer["choices"]
    scores = [choice["beam_score"] for choice in choices]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert scores == sorted(scores, reverse=True)
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 3
    for choice in choices:
        num_tokens = len(choice["token_ids"])
        assert choice["beam_score"] == pytest.approx(choice["cumulative_logprob"] / num_tokens**0.5, abs=1e-5)
        assert choice["finish_reason"] == ("length" if num_tokens == 7 else "stop")
    assert answer["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices)


@pytest.mark.asyncio(loop_scope="module")
async def test_more_beams_than_a_step_computes_are_refused(served: World) -> None:
    response = await served.client.post(TEXT, json={"prompt": "hi", "beam_width": 17})

    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "too_many_beams")
    assert "17 beams" in error["message"]


@pytest.mark.asyncio(loop_scope="module")
async def test_choices_that_are_generated_alone_say_nothing_of_a_search(served: World) -> None:
    answer = await served.post(TEXT, {"prompt": "hi", "n": 2, "max_tokens": 2, "use_beam_search": False})

    assert not {"beam_score", "cumulative_logprob"} & set(answer["choices"][0])
