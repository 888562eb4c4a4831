"""Several choices of one prompt, and parameters that change what is sampled, over HTTP and the official client."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedModel

from engine.contract.messages import SamplingParams
from tests.support.cluster.served_checkpoint import byte_tokenizer
from tests.support.engine.sampling_reference import greedy_reference
from tests.support.router.model_router import ModelRouter
from tests.support.router.router_rig import until

TEXT = "a baton goes from one runner to the next, and on"
PROMPT = byte_tokenizer().encode(TEXT).ids
BLOCK_SIZE = 16


def ids(choice: Any) -> list[int]:
    token_ids: list[int] = choice.token_ids
    return token_ids


def byte_ids(text: str) -> tuple[int, ...]:
    return tuple(byte_tokenizer().encode(text).ids)


async def complete(live: ModelRouter, **body: Any) -> Any:
    extra = {"return_token_ids": True, "ignore_eos": True, **body.pop("extra_body", {})}
    ask = {"prompt": PROMPT, "max_tokens": 10, "temperature": 0, **body}
    return await live.client.completions.create(model="tiny", **ask, extra_body=extra)


def mean_logprob(choice: Any) -> float:
    logprobs: list[float] = choice.logprobs.token_logprobs
    return sum(logprobs) / len(logprobs)


FEW = (50, 60, 70, 80, 90)

CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bias": (
        {"logit_bias": {"7": 40, "80": -100}},
        {"logit_bias": ((7, 40.0), (80, -100.0))},
    ),
    "penalties": (
        {
            "presence_penalty": 1.5,
            "frequency_penalty": 1.9,
            "extra_body": {"repetition_penalty": 1.6, "allowed_token_ids": list(FEW)},
        },
        {
            "presence_penalty": 1.5,
            "frequency_penalty": 1.9,
            "repetition_penalty": 1.6,
            "allowed_token_ids": FEW,
        },
    ),
    "allowed": (
        {"extra_body": {"allowed_token_ids": [50, 60, 70, 70], "repetition_penalty": 1.5}},
        {"allowed_token_ids": (50, 60, 70), "repetition_penalty": 1.5},
    ),
    "bad words": (
        {"logit_bias": {"70": 60, "71": 60}, "extra_body": {"bad_words": ["Ą", "dd", "de", "eee"]}},
        {
            "logit_bias": ((70, 60.0), (71, 60.0)),
            "bad_words": tuple(byte_ids(word) for bare in ("Ą", "dd", "de", "eee") for word in (bare, f" {bare}")),
        },
    ),
    "all": (
        {
            "logit_bias": {"70": 9},
            "presence_penalty": 1.0,
            "extra_body": {"allowed_token_ids": [*range(60, 90)], "bad_words": ["d"], "repetition_penalty": 1.2},
        },
        {
            "logit_bias": ((70, 9.0),),
            "allowed_token_ids": tuple(range(60, 90)),
            "bad_words": (byte_ids("d"), byte_ids(" d")),
            "presence_penalty": 1.0,
            "repetition_penalty": 1.2,
        },
    ),
}


@pytest.mark.parametrize("name", CHANGES)
async def test_parameters_change_the_tokens_as_defined(live: ModelRouter, oracle: PreTrainedModel, name: str) -> None:
    body, params = CHANGES[name]
    reference = greedy_reference(oracle, PROMPT, SamplingParams(max_tokens=10, ignore_eos=True, **params))
    unchanged = {"allowed_token_ids": FEW} if name == "penalties" else {}
    plain = greedy_reference(oracle, PROMPT, SamplingParams(max_tokens=10, ignore_eos=True, **unchanged))

    answer = await complete(live, **body)

    assert tuple(ids(answer.choices[0])) == reference.token_ids
    assert reference.token_ids != plain.token_ids


async def test_choices_are_those_of_their_seeds_alone(live: ModelRouter) -> None:
    ask: dict[str, Any] = {"temperature": 1.2, "max_tokens": 12}
    together = await complete(live, n=4, seed=40, **ask)
    alone = [await complete(live, seed=40 + index, **ask) for index in range(4)]
    chunks = [chunk async for chunk in await complete(live, n=4, seed=40, stream=True, **ask)]

    tokens = [ids(choice) for choice in together.choices]
    assert tokens == [ids(answer.choices[0]) for answer in alone]
    assert len({tuple(row) for row in tokens}) == 4
    streamed: list[list[int]] = [[], [], [], []]
    for chunk in chunks:
        choice = chunk.choices[0]
        streamed[choice.index] += getattr(choice, "token_ids", None) or []
    assert streamed == tokens
    assert together.usage.prompt_tokens == len(PROMPT)
    assert together.usage.completion_tokens == 4 * 12


async def test_choices_without_a_seed_differ(live: ModelRouter) -> None:
    answer = await complete(live, n=5, temperature=2.0)

    assert len({tuple(ids(choice)) for choice in answer.choices}) == 5


async def test_best_of_gives_the_most_likely_candidates(live: ModelRouter) -> None:
    ask: dict[str, Any] = {"temperature": 1.5, "seed": 3, "max_tokens": 6}
    candidates = await complete(live, n=5, logprobs=0, **ask)
    best = await complete(live, n=2, best_of=5, **ask)
    with_logprobs = await complete(live, n=1, best_of=5, logprobs=1, **ask)

    ranked = sorted(candidates.choices, key=mean_logprob, reverse=True)
    assert [ids(choice) for choice in best.choices] == [ids(choice) for choice in ranked[:2]]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert [choice.logprobs for choice in best.choices] == [None, None]
    assert best.usage.completion_tokens == 5 * 6
    assert best.usage.prompt_tokens == len(PROMPT)
    assert with_logprobs.choices[0].logprobs.token_logprobs == pytest.approx(
        ranked[0].logprobs.token_logprobs, abs=1e-4
    )


async def test_best_of_does_not_prefer_the_shortest_candidate(live: ModelRouter) -> None:
    """A sum of log-probabilities falls with each token, so that the shortest has nearly always the highest."""
    ask: dict[str, Any] = {"temperature": 1.5, "seed": 3, "max_tokens": 8}
    whole = await complete(live, n=5, logprobs=0, **ask)
    rows = [list(zip(ids(choice), choice.logprobs.token_logprobs, strict=True)) for choice in whole.choices]
    unlikely, _ = min((row[0] for row in rows), key=lambda entry: entry[1])
    ask["extra_body"] = {"stop_token_ids": [unlikely]}

    candidates = await complete(live, n=5, logprobs=0, **ask)
    best = await complete(live, n=1, best_of=5, **ask)

    by_sum = max(candidates.choices, key=lambda choice: sum(choice.logprobs.token_logprobs))
    assert ids(by_sum) == [unlikely]
    assert ids(best.choices[0]) == ids(max(candidates.choices, key=mean_logprob))
    assert ids(best.choices[0]) != [unlikely]


async def test_best_of_ranks_each_prompt_by_itself(live: ModelRouter) -> None:
    ask: dict[str, Any] = {"temperature": 1.5, "seed": 3, "max_tokens": 5}
    prompts = [PROMPT, PROMPT[:20], PROMPT[5:30]]
    together = await complete(live, n=2, best_of=3, **{**ask, "prompt": prompts})

    for place, prompt in enumerate(prompts):
        alone = await complete(live, n=2, best_of=3, **{**ask, "prompt": prompt})
        mine = together.choices[2 * place : 2 * place + 2]
        assert [ids(choice) for choice in mine] == [ids(choice) for choice in alone.choices]
        assert [choice.index for choice in mine] == [2 * place, 2 * place + 1]


async def test_choices_share_what_is_computed_and_moved(live: ModelRouter) -> None:
    num_choices = 6
    await complete(live, n=num_choices, temperature=1.0, seed=1, max_tokens=4)
    await until(live.is_at_rest)

    prefill, decode = live.prefill_load().counters, live.decode_load().counters
    num_rest = len(PROMPT) % BLOCK_SIZE or BLOCK_SIZE
    assert prefill["num_scheduled_tokens"] == len(PROMPT) + (num_choices - 1) * num_rest
    num_full = len(PROMPT) // BLOCK_SIZE
    assert decode["num_blocks"] <= num_full + num_choices
    assert decode["recomputed_tokens"] == 0


async def test_max_tokens_0_is_for_echo_only(live: ModelRouter) -> None:
    answer = await complete(live, max_tokens=0, echo=True, n=2)

    assert [choice.text for choice in answer.choices] == [TEXT, TEXT]
    assert answer.usage.completion_tokens == 0
    with pytest.raises(Exception, match="max_tokens is 0"):
        await complete(live, max_tokens=0)


async def test_a_chat_can_repeat_the_message_that_it_goes_on_with(live: ModelRouter) -> None:
    ask: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well, "}],
        "max_tokens": 5,
        "temperature": 0,
    }
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    plain = await live.client.chat.completions.create(**ask, extra_body=going_on)
    echoed = await live.client.chat.completions.create(**ask, extra_body={**going_on, "echo": True})
    chunks = [
        chunk
        async for chunk in await live.client.chat.completions.create(
            **ask, stream=True, extra_body={**going_on, "echo": True}
        )
    ]

    assert echoed.choices[0].message.content == f"well, {plain.choices[0].message.content}"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == echoed.choices[0].message.content
