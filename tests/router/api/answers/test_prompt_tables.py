"""Log-probabilities of long prompts: written once for all choices, beside the event loop, and never more than fit."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from engine.contract.messages import LogprobTable
from router.api.answers.answer_format import AnswerHead, Collected
from router.api.answers.completion_format import CompletionFormat
from router.api.answers.logprobs_answer import LogprobsAnswer
from router.api.answers.sse import GenerationResponse
from router.request.text_output import TextOutput
from router.text.token_spelling import TokenSpeller
from tests.support.router.router_rig import router_rig

NUM_ROWS, NUM_TOP = 20, 3


class CountingSpeller:
    """Spells nothing, and counts how often it is asked, and in which threads."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.threads: set[int] = set()

    def spell(self, token_id: int) -> Any:
        """A spelling."""
        self.num_asked += 1
        self.threads.add(threading.get_ident())
        return type("Spelling", (), {"text": f"<{token_id}>", "data": None, "is_whole": True})


class OutputOfPrompt:
    """An output that ended immediately, with log-probabilities of its prompt."""

    def __init__(self) -> None:
        self.prompt_token_ids = tuple(range(NUM_ROWS + 1))
        self.cached_tokens = 0
        self.num_output_tokens = 0
        self.num_prompt_tokens = NUM_ROWS + 1
        self.num_cached_tokens = 0
        self.mean_logprob = 0.0
        self.turn = None
        self.beam = None
        self.num_predicted = None
        ids = np.arange(NUM_ROWS * (1 + NUM_TOP), dtype=np.int32).reshape(NUM_ROWS, 1 + NUM_TOP)
        self.prompt_logprobs = LogprobTable(
            token_ids=ids, logprobs=-ids.astype(np.float32), ranks=np.ones(NUM_ROWS, dtype=np.int32)
        )

    async def take(self) -> Sequence[Any]:
        """Nothing more."""
        return ()

    def cancel(self) -> None:
        """Nothing runs."""


def _answer(num_choices: int) -> tuple[CompletionFormat, CountingSpeller, list[TextOutput]]:
    speller = CountingSpeller()
    logprobs = LogprobsAnswer(
        speller=cast(TokenSpeller, speller), num_top=0, detokenizer=cast(Any, None), as_token_ids=False
    )
    head = AnswerHead(
        answer_id="cmpl-1",
        created_s=0,
        model="m",
        num_choices_per_prompt=num_choices,
        num_candidates_per_prompt=num_choices,
        logprobs=logprobs,
        num_prompt_logprobs=NUM_TOP,
        tells_of_prompts=True,
    )
    outputs = [cast(TextOutput, OutputOfPrompt()) for _ in range(num_choices)]
    return CompletionFormat(head), speller, outputs


def test_what_is_told_of_a_prompt_is_written_once_for_all_choices() -> None:
    one, one_speller, one_output = _answer(1)
    many, many_speller, many_outputs = _answer(16)
    expected = json.loads(one.whole([Collected(one_output[0])], one_output))["choices"][0]["prompt_logprobs"]

    choices = json.loads(many.whole([Collected(output) for output in many_outputs], many_outputs))["choices"]

    assert len(expected) == NUM_ROWS + 1
    assert [choice["prompt_logprobs"] for choice in choices] == [expected] * 16
    assert many_speller.num_asked == one_speller.num_asked == NUM_ROWS * (1 + NUM_TOP)


async def test_what_is_told_of_a_prompt_is_written_beside_the_event_loop() -> None:
    answer, speller, outputs = _answer(2)
    response = GenerationResponse(outputs, answer, stream=False, write_timeout_s=10.0)
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await response({"type": "http"}, asyncio.Event().wait, send)  # type: ignore[arg-type]

    assert len(json.loads(b"".join(message.get("body", b"") for message in sent))["choices"]) == 2
    assert speller.threads
    assert threading.get_ident() not in speller.threads


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"prompt_logprobs": 20}, "prompt_logprobs"), ({"logprobs": 20, "echo": True}, "logprobs")],
)
async def test_more_than_fits_is_refused_naming_the_numbers(
    model_dir: Path, fields: dict[str, Any], param: str
) -> None:
    body = {"prompt": [[5] * 400] * 10, "n": 5, "max_tokens": 1, **fields}

    async with router_rig(model_dir) as rig:
        error = (await rig.client.post("/v1/completions", json=body)).json()["error"]
        seen = rig.prefill[0].seen

    assert error["param"] == param
    assert "4000 prompt tokens" in error["message"]
    assert "420000 log-probabilities, the limit is 400000" in error["message"]
    assert seen == []
