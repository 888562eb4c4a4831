"""Log-probabilities through HTTP and the official client, against transformers' log-softmax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openai
import pytest
import torch
from openai.types.chat import ChatCompletionTokenLogprob
from transformers import PreTrainedModel

from router.text.detokenizer import token_bytes
from tests.support.cluster.served_checkpoint import byte_tokenizer
from tests.support.engine.checkpoints import oracle_logits
from tests.support.router.model_router import ModelRouter

TOLERANCE = 2e-4
TEXT = "a baton goes from one runner to the next"
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": TEXT}]
TABLE = token_bytes(byte_tokenizer()) or {}


def expected_logprobs(oracle: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """[num_tokens - 1, vocab_size]: the log-probabilities at each token except the first."""
    return torch.log_softmax(oracle_logits(oracle, list(token_ids)).double(), dim=1)[:-1]


def assert_entry(entry: ChatCompletionTokenLogprob, token_id: int, expected: torch.Tensor, num_top: int) -> None:
    data = TABLE[token_id]
    assert entry.bytes == list(data)
    assert entry.token == data.decode(errors="replace")
    assert entry.logprob == pytest.approx(expected[token_id].item(), abs=TOLERANCE)
    best = expected.topk(num_top)
    assert [top.bytes for top in entry.top_logprobs] == [list(TABLE[token]) for token in best.indices.tolist()]
    assert [top.logprob for top in entry.top_logprobs] == pytest.approx(best.values.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("num_top", [0, 5])
async def test_chat_is_told_with_each_token(live: ModelRouter, oracle: PreTrainedModel, num_top: int) -> None:
    answer = await live.client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=12,
        temperature=1.3,
        seed=4,
        presence_penalty=0.5,
        logprobs=True,
        top_logprobs=num_top,
        extra_body={"return_token_ids": True, "ignore_eos": True, "repetition_penalty": 1.2},
    )

    prompt: list[int] = answer.prompt_token_ids  # type: ignore[attr-defined]
    tokens: list[int] = answer.choices[0].token_ids  # type: ignore[attr-defined]
    expected = expected_logprobs(oracle, prompt + tokens)[len(prompt) - 1 :]
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content) == len(tokens) == 12
    for entry, token, values in zip(content, tokens, expected, strict=True):
        assert_entry(entry, token, values, num_top)


async def test_stream_tells_the_same_and_with_the_text_it_belongs_to(live: ModelRouter) -> None:
    # The two halves of one character and a letter: many tokens are half a character, and some halves stay alone.
    ask: dict[str, Any] = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 40,
        "temperature": 2.0,
        "seed": 5,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"allowed_token_ids": [token for token, data in TABLE.items() if data in b"\xc3\xa9a"]},
    }
    whole = await live.client.chat.completions.create(**ask)
    chunks = [chunk async for chunk in await live.client.chat.completions.create(**ask, stream=True)]

    assert whole.choices[0].logprobs is not None
    text, entries = "", []
    for chunk in chunks:
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        entries += (choice.logprobs.content or []) if choice.logprobs is not None else []
        data = bytes(byte for entry in entries for byte in entry.bytes or ())
        assert data.decode(errors="replace") == text
    assert entries == whole.choices[0].logprobs.content
    assert text == whole.choices[0].message.content
    assert "\u00e9" in text
    assert "\ufffd" in text


async def test_stop_string_holds_entries_back_with_their_text(live: ModelRouter) -> None:
    ask: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 30, "temperature": 0, "logprobs": True}
    letters = {"allowed_token_ids": [token for token, data in TABLE.items() if data.isalpha()]}
    free = await live.client.chat.completions.create(**ask, extra_body=letters)
    text = free.choices[0].message.content or ""
    stop = text[10:14]
    end = text.index(stop)

    stream = await live.client.chat.completions.create(**ask, extra_body=letters, stop=[stop], stream=True)
    chunks = [chunk.choices[0] async for chunk in stream]

    sent, names = "", ""
    for choice in chunks[:-1]:
        sent += choice.delta.content or ""
        names += "".join(entry.token for entry in (choice.logprobs.content or [])) if choice.logprobs else ""
        assert names == sent
        assert sent == text[: len(sent)]
        assert len(sent) <= end
    last = chunks[-1]
    sent += last.delta.content or ""
    assert last.finish_reason == "stop"
    assert sent == text[:end]
    # Every generated token is told of once; those of the stop string come with the end.
    assert last.logprobs is not None
    names += "".join(entry.token for entry in last.logprobs.content or [])
    assert names == text[: end + len(stop)]


@pytest.mark.parametrize("max_tokens", [0, 4])
@pytest.mark.parametrize("num_top", [0, 3])
async def test_echo_tells_of_the_prompt(
    live: ModelRouter, oracle: PreTrainedModel, max_tokens: int, num_top: int
) -> None:
    answer = await live.client.completions.create(
        model="tiny",
        prompt=TEXT,
        max_tokens=max_tokens,
        temperature=0,
        echo=True,
        logprobs=num_top,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )

    choice = answer.choices[0]
    tokens: list[int] = choice.prompt_token_ids + choice.token_ids  # type: ignore[attr-defined]
    expected = expected_logprobs(oracle, tokens)
    told = choice.logprobs
    assert told is not None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == max_tokens == len(tokens) - len(TEXT)
    assert choice.text.startswith(TEXT)
    assert choice.finish_reason == "length"
    assert told.token_logprobs is not None
    assert told.top_logprobs is not None
    assert told.token_logprobs[0] is None
    assert told.top_logprobs[0] is None
    assert told.token_logprobs[1:] == pytest.approx(
        expected.gather(1, torch.tensor(tokens[1:])[:, None]).flatten().tolist(), abs=TOLERANCE
    )
    assert told.text_offset is not None
    assert told.text_offset[: len(TEXT)] == list(range(len(TEXT)))
    assert told.tokens is not None
    assert "".join(told.tokens[: len(TEXT)]) == TEXT
    for named, token, values in zip(told.top_logprobs[1:], tokens[1:], expected, strict=True):
        assert num_top <= len(named) <= num_top + 1
        best = [values[token].item(), *values.topk(num_top).values.tolist()]
        assert sorted(named.values()) == pytest.approx(sorted(set(best)), abs=TOLERANCE)


async def test_streamed_echo_tells_the_same(live: ModelRouter) -> None:
    ask: dict[str, Any] = {"model": "tiny", "max_tokens": 5, "temperature": 0, "echo": True, "logprobs": 2}
    ask["prompt"] = [TEXT, "another one"]
    whole = await live.client.completions.create(**ask, n=2)
    chunks = [chunk async for chunk in await live.client.completions.create(**ask, n=2, stream=True)]

    for index, expected in enumerate(whole.choices):
        parts = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        told = [part.logprobs for part in parts if part.logprobs is not None]
        assert "".join(part.text for part in parts) == expected.text
        assert expected.logprobs is not None
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            assert [item for part in told for item in getattr(part, name)] == getattr(expected.logprobs, name)


async def test_prompt_logprobs_of_both_endpoints(live: ModelRouter, oracle: PreTrainedModel) -> None:
    extra = {"prompt_logprobs": 2, "return_token_ids": True}
    chat = await live.client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2, extra_body=extra)
    text = await live.client.completions.create(model="tiny", prompt=TEXT, max_tokens=2, n=2, extra_body=extra)

    answers: list[Any] = [chat, *text.choices]
    for answer in answers:
        prompt: list[int] = answer.prompt_token_ids
        told: list[dict[str, dict[str, Any]] | None] = answer.prompt_logprobs
        assert told[0] is None
        assert len(told) == len(prompt)
        for named, token, values in zip(told[1:], prompt[1:], expected_logprobs(oracle, prompt), strict=True):
            assert named is not None
            best = values.topk(2).indices.tolist()
            assert set(named) == {str(token), *map(str, best)}
            entry = named[str(token)]
            assert entry["logprob"] == pytest.approx(values[token].item(), abs=TOLERANCE)
            assert entry["rank"] == int((values > values[token]).sum()) + 1
            assert entry["decoded_token"] == TABLE[token].decode(errors="replace")
    assert chat.choices[0].logprobs is None


async def test_tokens_can_be_named_by_their_ids(live: ModelRouter) -> None:
    answer = await live.client.completions.create(
        model="tiny",
        prompt=TEXT,
        max_tokens=5,
        logprobs=2,
        extra_body={"return_tokens_as_token_ids": True, "return_token_ids": True},
    )

    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]  # type: ignore[attr-defined]


async def test_a_cached_prompt_is_told_of_too(live: ModelRouter) -> None:
    ask: dict[str, Any] = {"model": "tiny", "prompt": TEXT * 3, "max_tokens": 0, "echo": True, "logprobs": 1}
    first = await live.client.completions.create(**ask)
    second = await live.client.completions.create(**ask)

    assert first.choices[0].logprobs == second.choices[0].logprobs
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == 0
