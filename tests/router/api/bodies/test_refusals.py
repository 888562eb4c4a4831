"""Bad input: each refusal has its status, OpenAI's shape, and the parameter's name; nothing reaches a worker."""

from __future__ import annotations

import dataclasses
import gzip
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.router.router_rig import FAST, RouterRig, router_rig
from tests.support.router.router_tokenizer import write_model_dir
from tests.support.router.shared_rig import shared_rig

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


pytestmark = pytest.mark.asyncio(loop_scope="module")
kept, rig = shared_rig(settings=dataclasses.replace(FAST, max_body_bytes=50_000))


BAD_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"no_such_thing": 1}, "no_such_thing"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": 2**63}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size"),
    ({"no_repeat_ngram_size": 65}, "no_repeat_ngram_size"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": "x" * 1001}, "stop"),
    ({"stop": ["y", "x" * 1001]}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids"),
    ({"stop_token_ids": [5, 400]}, "stop_token_ids"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 100_000}, "n"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"other": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"best_of": 100_000}, "best_of"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": "much"}}, "logit_bias"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"05": 1}}, "logit_bias"),
    ({"logit_bias": {"400": 1}}, "logit_bias"),
    ({"logit_bias": {str(number): "x" for number in range(2000)}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [5, 400]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": "word"}, "bad_words"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": -2}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"user": 5}, "user"),
    ({"metadata": {str(number): 5 for number in range(300)}}, "metadata"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_VALUES, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_bad_parameter_is_named(rig: RouterRig, path: str, fields: dict[str, Any], param: str) -> None:
    base: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}

    response = await rig.client.post(path, json={**base, **fields})

    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param in error["message"]
    assert rig.prefill[0].seen == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "x", "other": 0}]}, "messages"),
        ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools"),
        ({"messages": MESSAGES, "logprobs": 3}, "logprobs"),
        ({"messages": MESSAGES, "top_logprobs": 3}, "top_logprobs"),
        ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": MESSAGES, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
        (
            {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
    ],
)
async def test_bad_chat_is_named(rig: RouterRig, body: dict[str, Any], param: str) -> None:
    response = await rig.client.post(CHAT, json=body)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TEXT_PART = {"type": "text", "text": "look"}


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ({"role": "function", "content": "x", "name": "f"}, "messages.1.role", "(function) is not supported"),
        ({"role": "assistant", "content": "x", "function_call": CALL}, "messages.1.function_call", "not supported"),
        ({"role": "assistant", "content": None, "audio": {"id": "1"}}, "messages.1.audio", "not supported"),
        ({"role": "assistant", "content": "x", "refusal": "no"}, "messages.1.refusal", "not supported"),
        (
            {"role": "user", "content": [TEXT_PART, {"type": "image_url", "image_url": {"url": "x"}}]},
            "messages.1.content.1",
            "(image_url) is not supported: send text parts only",
        ),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}]},
            "messages.1.content.0",
            "(input_audio) is not supported: send text parts only",
        ),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_what_a_message_cannot_have_is_named_with_its_place(
    rig: RouterRig, path: str, message: dict[str, Any], param: str, words: str
) -> None:
    response = await rig.client.post(path, json={"messages": [*MESSAGES, message]})

    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", param)
    assert words in error["message"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([{"type": "text"}], "'messages.0.content.0.text' is invalid: Field required"),
        ([TEXT_PART, {"type": "other", "text": "x"}], "'messages.0.content.1.type' is invalid"),
        ([TEXT_PART, 5], "'messages.0.content.1' is invalid"),
        ([], "'messages.0.content' is invalid: List should have at least 1 item"),
        (None, "'messages.0.content' is invalid: Input should be a valid string"),
    ],
)
async def test_bad_content_is_named_with_its_place(rig: RouterRig, content: object, words: str) -> None:
    response = await rig.client.post(CHAT, json={"messages": [{"role": "user", "content": content}]})

    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages")
    assert words in error["message"]
    assert "; or " not in error["message"]


async def test_empty_fields_of_an_answer_are_fine_in_a_message(rig: RouterRig) -> None:
    empty = {"refusal": None, "tool_calls": [], "function_call": None, "audio": None, "annotations": []}
    messages = [*MESSAGES, {"role": "assistant", "content": "x", **empty}, *MESSAGES]

    response = await rig.client.post(CHAT, json={"messages": messages, "max_tokens": 1})

    assert response.status_code == 200


@pytest.mark.parametrize("fields", [{"logprobs": 21}, {"logprobs": -1}, {"logprobs": True}, {"logprobs": -2}])
async def test_bad_logprobs_of_a_text_are_named(rig: RouterRig, fields: dict[str, Any]) -> None:
    response = await rig.complete("hi", **fields)

    assert (response.status_code, response.json()["error"]["param"]) == (400, "logprobs")


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "no tokens"),
        ([], "at least 1"),
        ([[]], "at least 1"),
        ([5, 399, 400], "400"),
        ([5, -1], "'prompt.1' is invalid: Input should be greater than or equal to 0"),
        ([5, "a"], "'prompt.1' is invalid: Input should be a valid integer"),
        ([True], "'prompt.0' is invalid: Input should be a valid integer"),
        (["a", 5], "'prompt.1' is invalid: Input should be a valid string"),
        ([[5], "a"], "'prompt.1' is invalid: Input should be a valid array"),
        ([[5], [6, -1]], "'prompt.1.1' is invalid: Input should be greater than or equal to 0"),
        ([-1] * 1000, "'prompt.0' is invalid: Input should be greater than or equal to 0"),
        (None, "Input should be a valid string"),
        ({"a": 1}, "Input should be a valid string"),
    ],
)
async def test_bad_prompt_is_refused(rig: RouterRig, prompt: object, words: str) -> None:
    response = await rig.client.post(TEXT, json={"prompt": prompt})

    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "prompt")
    assert words in error["message"]
    assert "; or " not in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "hi", **{f"x{number}": 1 for number in range(300)}},
        {"messages": [{"role": "user", "content": "hi", **{f"x{number}": 1 for number in range(300)}}]},
    ],
)
async def test_object_with_many_fields_is_refused_as_a_whole(rig: RouterRig, body: dict[str, Any]) -> None:
    response = await rig.client.post(TEXT if "prompt" in body else CHAT, json=body)

    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert "fields, the limit is 256" in error["message"]


async def test_neutral_values_of_unsupported_parameters_are_fine(rig: RouterRig) -> None:
    neutral = {"length_penalty": 1.0, "response_format": {"type": "text"}, "logprobs": None, "suffix": None}
    streamed = {"stream": True, "stream_options": {"include_obfuscation": False}}

    response = await rig.complete("hi", max_tokens=2, user="me", metadata={"a": "b"}, **neutral, **streamed)

    assert response.status_code == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1,2]", b"null", b"\xff\xfe", b'{"prompt": "\\ud800"}', b'{"prompt": NaN}']
)
async def test_malformed_body_is_a_400(rig: RouterRig, body: bytes) -> None:
    response = await rig.client.post(TEXT, content=body, headers={"Content-Type": "application/json"})

    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_prompt_that_is_too_long_names_both_lengths(rig: RouterRig) -> None:
    response = await rig.complete([5] * 512, max_tokens=1)

    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 512 tokens" in error["message"]  # clients look for these words
    assert error["message"].count("512") == 2
    assert rig.prefill[0].seen == []


async def test_more_output_than_fits_is_refused(rig: RouterRig) -> None:
    response = await rig.complete([5] * 500, max_tokens=13)

    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "max_tokens")
    assert all(number in error["message"] for number in ("500", "13", "513"))
    assert "maximum context length is 512 tokens" in error["message"]


@pytest.mark.parametrize(
    ("bias", "words"),
    [
        ({"five": 1, "50": 1}, "got 'five'"),
        ({"05": 1, "-1": 2, "": 3}, "got '05', '-1', ''"),
        ({f"x{number}": 1 for number in range(9)}, "got 'x0', 'x1', 'x2', 'x3', 'x4' and 4 more"),
    ],
)
async def test_bias_for_what_is_no_token_id_names_the_keys(rig: RouterRig, bias: dict[str, float], words: str) -> None:
    error = (await rig.complete("hi", logit_bias=bias)).json()["error"]

    assert (error["code"], error["param"]) == ("invalid_parameter", "logit_bias")
    assert error["message"].endswith(f"keys must be token ids such as '50', {words}")


@pytest.mark.parametrize("coding", ["gzip", "br", "GZIP, identity"])
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize"])
async def test_encoded_body_is_a_415_that_says_so(rig: RouterRig, path: str, coding: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": coding}
    response = await rig.client.post(path, content=gzip.compress(b'{"prompt": "hi"}'), headers=headers)

    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (415, "unsupported_content_encoding")
    assert repr(coding) in error["message"]
    assert response.headers["accept-encoding"] == "identity"


async def test_body_that_says_it_is_not_encoded_is_taken(rig: RouterRig) -> None:
    response = await rig.client.post(
        TEXT, json={"prompt": "hi", "max_tokens": 1}, headers={"Content-Encoding": "identity"}
    )

    assert response.status_code == 200


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_limit_is_named_as_it_was_sent(rig: RouterRig, name: str) -> None:
    too_much = (await rig.chat("hi", **{name: 512})).json()["error"]
    too_little = (await rig.chat("hi", min_tokens=9, **{name: 8})).json()["error"]

    assert (too_much["code"], too_much["param"]) == ("context_length_exceeded", name)
    assert f" {name} is 512" in too_much["message"]
    assert (too_little["param"], too_little["message"]) == ("min_tokens", f"min_tokens is 9, but {name} is 8")


@pytest.mark.parametrize("min_tokens", [1, 2])
async def test_no_tokens_cannot_be_at_least_some(rig: RouterRig, min_tokens: int) -> None:
    error = (await rig.complete("hi", max_tokens=0, echo=True, min_tokens=min_tokens)).json()["error"]

    assert (error["param"], error["message"]) == ("min_tokens", f"min_tokens is {min_tokens}, but max_tokens is 0")


async def test_unknown_model_is_a_404_that_names_the_served_one(rig: RouterRig) -> None:
    response = await rig.complete("hi", model="other")

    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "tiny" in error["message"]


@pytest.mark.parametrize("declares_length", [True, False])
async def test_body_that_is_too_large_is_a_413(rig: RouterRig, declares_length: bool) -> None:
    num_chunks_read = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal num_chunks_read
        for _ in range(100):
            num_chunks_read += 1
            yield b" " * 10_000

    content: bytes | AsyncIterator[bytes] = b" " * 1_000_000 if declares_length else chunks()
    response = await rig.client.post(TEXT, content=content, headers={"Content-Type": "application/json"})

    assert response.status_code == 413
    assert "50000" in response.json()["error"]["message"]
    assert declares_length or num_chunks_read < 100


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "1e9"])
async def test_bad_timeout_header_is_named(rig: RouterRig, value: str) -> None:
    response = await rig.client.post(TEXT, json={"prompt": "hi"}, headers={"X-Request-Timeout": value})

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Request-Timeout"


async def test_unknown_path_and_wrong_method_have_the_same_shape(rig: RouterRig) -> None:
    missing = await rig.client.get("/v1/nothing")
    wrong = await rig.client.get(TEXT)

    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


async def test_conversation_that_the_template_refuses_is_a_400(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    async with router_rig(write_model_dir(tmp_path, config={"chat_template": template})) as rig:
        error = (await rig.chat("hi")).json()["error"]

        assert error["param"] == "messages"
        assert "roles must alternate" in error["message"]


async def test_model_without_a_template_says_what_to_use(tmp_path: Path) -> None:
    async with router_rig(write_model_dir(tmp_path, config={"chat_template": None})) as rig:
        response = await rig.chat("hi")

        assert (response.status_code, response.json()["error"]["code"]) == (400, "no_chat_template")


async def test_no_healthy_replica_is_a_503_with_retry_after(model_dir: Path) -> None:
    async with router_rig(model_dir, num_decode=0) as rig:
        response = await rig.complete("hi")

        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_healthy_replica")
        assert int(response.headers["retry-after"]) >= 1
        assert rig.prefill[0].seen == []


async def test_refusals_of_the_engine_keep_their_code(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        rig.prefill[0].refuse_code = "prompt_too_long"
        response = await rig.complete("hi", max_tokens=3)

        assert (response.status_code, response.json()["error"]["code"]) == (400, "prompt_too_long")
