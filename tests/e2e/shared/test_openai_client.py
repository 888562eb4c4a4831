"""The official client against a real cluster, streaming and not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from tests.support.cluster.cluster import ClusterProcess
from tests.support.cluster.http_completions import read_status
from tests.support.engine.checkpoints import load_oracle, oracle_logits

MESSAGES = [{"role": "user", "content": "Tell me a story about the sea."}]
MAX_TOKENS = 24
PROMPT_IDS = [5, *range(100, 180, 2), 9, 8, 7]


@pytest.fixture
def client(cluster: ClusterProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_a_streamed_chat_is_the_chat(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=MAX_TOKENS, temperature=0, extra_body={"ignore_eos": True}
    )
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=MESSAGES,
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "length"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert whole.usage is not None
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == MAX_TOKENS
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.total_tokens == usage.prompt_tokens + MAX_TOKENS


def test_a_completion_stops_at_a_stop_string(client: openai.OpenAI, model: str) -> None:
    prompt = "once upon a time"
    free = client.completions.create(model=model, prompt=prompt, max_tokens=40, temperature=0)
    text = free.choices[0].text
    stop = text[10:12]

    stopped = client.completions.create(model=model, prompt=prompt, max_tokens=40, temperature=0, stop=[stop])

    assert stopped.choices[0].text == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


def test_the_same_seed_gives_the_same_sample(client: openai.OpenAI, model: str) -> None:
    def sample(seed: int) -> str:
        answer = client.completions.create(
            model=model, prompt="abc", max_tokens=30, temperature=1.0, seed=seed, extra_body={"ignore_eos": True}
        )
        return answer.choices[0].text

    assert sample(5) == sample(5)
    assert sample(5) != sample(6)


def test_a_prompt_that_is_too_long_is_refused_with_both_lengths(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match=r"3000.*1024|1024.*3000"):
        client.completions.create(model=model, prompt=[5] * 3000, max_tokens=4)


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.completions.create(model="no-such-model", prompt="a", max_tokens=4)


@pytest.mark.parametrize("given", [{}, {"X-Request-Id": "my-own-id"}])
def test_an_answer_has_one_request_id(cluster: ClusterProcess, given: dict[str, str]) -> None:
    response = httpx.get(f"{cluster.url}/health", headers=given, timeout=60.0, trust_env=False)

    (answered,) = response.headers.get_list("x-request-id")
    assert answered
    assert answered == given.get("X-Request-Id", answered)


@pytest.mark.parametrize("given", [["two words"], ["x" * 129], ["caf\xe9"], ["one", "two"], [""]])
@pytest.mark.parametrize("path", ["/health", "/no-such-path", "/v1/completions"])
def test_a_request_id_that_breaks_the_rule_is_replaced(cluster: ClusterProcess, path: str, given: list[str]) -> None:
    headers = [(b"X-Request-Id", value.encode("latin-1")) for value in given]
    response = httpx.get(f"{cluster.url}{path}", headers=headers, timeout=60.0, trust_env=False)

    (answered,) = response.headers.get_list("x-request-id")
    assert answered
    assert answered not in given
    assert answered.isascii()
    assert len(answered) <= 128


def test_log_probabilities_cross_the_cluster(client: openai.OpenAI, model: str, served_model: Path) -> None:
    answer = client.completions.create(
        model=model,
        prompt=PROMPT_IDS,
        max_tokens=6,
        temperature=0,
        echo=True,
        logprobs=2,
        extra_body={"ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True},
    )

    choice = answer.choices[0]
    tokens = [*PROMPT_IDS, *choice.token_ids]  # type: ignore[attr-defined]
    expected = torch.log_softmax(oracle_logits(load_oracle(served_model), tokens).double(), dim=1)[:-1]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in tokens]
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(
        expected.gather(1, torch.tensor(tokens[1:])[:, None]).flatten().tolist(), abs=1e-3
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6


def test_choices_share_their_prompt_and_keep_their_rules(
    client: openai.OpenAI, model: str, cluster: ClusterProcess
) -> None:
    ask: dict[str, Any] = {
        "model": model,
        "prompt": [*PROMPT_IDS, 77, 78, 79],
        "max_tokens": 12,
        "temperature": 1.2,
        "logit_bias": {"50": 4},
        "logprobs": 0,
        "extra_body": {"ignore_eos": True, "return_token_ids": True, "bad_words": ["a"]},
    }
    before = read_status(cluster.url)["totals"]["transfers"]
    together = client.completions.create(**ask, n=4, seed=70)
    alone = [client.completions.create(**ask, seed=70 + index).choices[0] for index in range(4)]
    best = client.completions.create(**ask, n=1, best_of=4, seed=70).choices[0]

    assert [choice.token_ids for choice in together.choices] == [choice.token_ids for choice in alone]  # type: ignore[attr-defined]
    rows = [choice.logprobs.token_logprobs or [] for choice in together.choices if choice.logprobs is not None]
    means = [sum(row) / len(row) for row in rows]
    assert best.token_ids == together.choices[means.index(max(means))].token_ids  # type: ignore[attr-defined]
    assert read_status(cluster.url)["totals"]["transfers"] > before
