"""HTTP clients get the same whether the workers verify drafts or not: text, tokens, logprobs, usage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from engine.drafting.proposer import Drafting
from tests.support.cluster.served_checkpoint import byte_tokenizer
from tests.support.engine.proposers import Recorded, SometimesRight
from tests.support.router.model_router import ModelRouter, model_router
from tests.support.router.router_rig import until

PROMPT = byte_tokenizer().encode("a baton goes from one runner to the next, and on").ids
COMMON: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "extra_body": {"return_token_ids": True}}
LETTERS = {str(token): 8.0 for token in byte_tokenizer().encode("abc").ids}
"""With these favoured the model says enough of them for short stop strings to occur."""

ASKS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logprobs": 2},
    "choices": {"n": 3, "seed": 5, "temperature": 1.1},
    "choices with logprobs": {"n": 2, "seed": 9, "temperature": 0.8, "logprobs": 1},
    "stop strings": {"temperature": 0.9, "seed": 1, "logit_bias": LETTERS, "stop": ["ab", "ccc", "ba"], "logprobs": 0},
    "stop string late": {
        "temperature": 0.9,
        "seed": 1,
        "logit_bias": LETTERS,
        "stop": ["ab", "bc", "ca"],
        "extra_body": {"return_token_ids": True, "min_tokens": 9, "include_stop_str_in_output": True},
    },
    "best of": {"n": 1, "best_of": 3, "seed": 2, "temperature": 1.3},
    "penalties": {"temperature": 1.0, "seed": 4, "frequency_penalty": 1.2, "presence_penalty": 0.5, "logprobs": 1},
}


def comparable(answer: Any) -> tuple[list[Any], Any]:
    """All but what is new for every request, log-probabilities as near as computing in another order leaves them."""
    choices = [choice.model_dump() for choice in answer.choices]
    for choice in choices:
        for said in filter(None, (choice["logprobs"],)):
            said["token_logprobs"] = [pytest.approx(value, abs=2e-4) for value in said["token_logprobs"]]
            said["top_logprobs"] = said["top_logprobs"] and [
                {token: pytest.approx(value, abs=2e-4) for token, value in top.items()} for top in said["top_logprobs"]
            ]
    return choices, answer.usage.model_dump(exclude={"completion_tokens_details"})


async def ask(live: ModelRouter, name: str) -> Any:
    return await live.client.completions.create(model="tiny", **{**COMMON, **ASKS[name]})


async def test_answers_are_the_same_with_drafts(live: ModelRouter, checkpoint_dir: Path) -> None:
    expected = {name: await ask(live, name) for name in ASKS}
    record = Recorded()
    for answer in expected.values():
        for choice in answer.choices:
            record.add([*PROMPT, *choice.token_ids])
    drafting = Drafting(proposer=SometimesRight(record, probability=0.85), max_draft_tokens=6)
    num_told = np.zeros(2)

    async with model_router(checkpoint_dir, drafting=drafting) as drafted:
        for name, answer in expected.items():
            said = await ask(drafted, name)
            assert comparable(said) == comparable(answer), name
            told = said.usage.completion_tokens_details
            if name != "best of":  # tells of the choices that it shows
                num_told += np.array([told.accepted_prediction_tokens, told.rejected_prediction_tokens])
            assert answer.usage.completion_tokens_details is None
        await until(drafted.is_at_rest)
        counters = drafted.decode_load().counters

    num_verified = np.array([counters["num_accepted_draft_tokens"], counters["num_draft_tokens"]])
    assert 0 < num_told[0] <= num_verified[0]
    assert num_told[0] < num_told.sum() <= num_verified[1]
    assert 0 < counters["num_accepted_draft_tokens"] < counters["num_draft_tokens"]
    stopped = [expected[name].choices[0] for name in ("stop strings", "stop string late")]
    assert [choice.finish_reason for choice in stopped] == ["stop", "stop"]


async def test_a_stream_says_what_the_whole_answer_says(checkpoint_dir: Path) -> None:
    record = Recorded()
    drafting = Drafting(proposer=SometimesRight(record, probability=0.85, proposes_all=True), max_draft_tokens=6)
    async with model_router(checkpoint_dir, drafting=drafting) as live:
        for name in ("greedy", "stop strings", "choices"):
            whole = await ask(live, name)
            for choice in whole.choices:
                record.add([*PROMPT, *choice.token_ids])
            texts, tokens = [""] * len(whole.choices), [list[int]() for _ in whole.choices]
            stream = await live.client.completions.create(model="tiny", stream=True, **{**COMMON, **ASKS[name]})
            async for chunk in stream:
                for part in chunk.choices:
                    texts[part.index] += part.text
                    tokens[part.index] += getattr(part, "token_ids", None) or []
            assert texts == [choice.text for choice in whole.choices]
            assert tokens == [choice.token_ids for choice in whole.choices]
        counters = live.decode_load().counters
        assert counters["num_accepted_draft_tokens"] > 0


async def test_a_prediction_makes_the_same_answer_in_fewer_steps(live: ModelRouter) -> None:
    """The caller's prediction is used as drafts although the cluster itself has no drafting method."""
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "a baton goes from one runner to the next"}],
        "max_tokens": 24,
        "temperature": 0,
        "logit_bias": LETTERS,
    }
    plain = await live.client.chat.completions.create(**asked)
    text = plain.choices[0].message.content
    assert text is not None
    assert plain.usage is not None
    assert plain.usage.completion_tokens_details is None
    before = live.decode_load().counters["num_accepted_draft_tokens"]

    predicted = await live.client.chat.completions.create(
        **asked,
        prediction={"type": "content", "content": [{"type": "text", "text": text}, {"type": "text", "text": "!"}]},
    )

    assert predicted.choices[0].message == plain.choices[0].message
    assert predicted.usage is not None
    details = predicted.usage.completion_tokens_details
    assert details is not None
    num_predicted = len(byte_tokenizer().encode(text).ids)
    assert details.accepted_prediction_tokens == num_predicted
    assert details.rejected_prediction_tokens == 1
    await until(live.is_at_rest)
    assert live.decode_load().counters["num_accepted_draft_tokens"] > before


@pytest.mark.parametrize(
    ("prediction", "place"),
    [
        ({"type": "content"}, "prediction.content"),
        ({"type": "text", "content": "a"}, "prediction.type"),
        ({"type": "content", "content": "a" * 5000}, "prediction"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content"),
    ],
)
async def test_a_prediction_that_cannot_be_followed_is_refused_by_name(
    live: ModelRouter, prediction: dict[str, Any], place: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await live.client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "a"}],
            prediction=prediction,
        )

    assert refused.value.param is not None
    assert refused.value.param.split(".")[0] == "prediction"
    assert place in str(refused.value)
