"""POST /v1/completions and /v1/chat/completions over HTTP: text, counts, ends, and their streams."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from router.text.tokenizer import Tokenizer
from tests.support.router.fake_workers import counting, scripted
from tests.support.router.router_rig import FAST, chat_text, completion_text, events, router_rig
from tests.support.router.router_tokenizer import BOS, EOS


def ids_of(model_dir: Path, text: str) -> list[int]:
    return Tokenizer.load(model_dir).encode(text)


async def test_answer_is_the_workers_tokens_as_text(model_dir: Path) -> None:
    answer = "the quick brown fox"
    script = ids_of(model_dir, answer)
    async with router_rig(model_dir, next_token=scripted(script)) as rig:
        body = (await rig.complete("hello", max_tokens=len(script))).json()

        choice = body["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (answer, "length", None)
        assert body["object"] == "text_completion"
        assert body["model"] == "tiny"
        assert rig.is_at_rest()


async def test_first_token_comes_from_prefill_and_the_rest_from_decode(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        body = (await rig.complete([5, 6, 7], max_tokens=6, seed=3, return_token_ids=True)).json()

        request = rig.prefill[0].seen[0]
        assert body["choices"][0]["token_ids"] == [counting(request, position) for position in range(6)]
        assert body["choices"][0]["prompt_token_ids"] == [5, 6, 7]
        assert (rig.prefill[0].num_tokens, rig.decode[0].num_tokens) == (1, 5)
        assert rig.decode[0].seen[0].kv_transfer is not None


@pytest.mark.known_failure(16)
async def test_usage_counts_prompt_output_and_cached_tokens(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        rig.prefill[0].num_cached_tokens = 16
        usage = (await rig.complete([5] * 20, max_tokens=4)).json()["usage"]

        assert usage == {
            "prompt_tokens": 20,
            "completion_tokens": 4,
            "total_tokens": 24,
            "prompt_tokens_details": {"cached_tokens": 16},
        }


async def test_one_token_never_reaches_decode(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        body = (await rig.complete("hello", max_tokens=1)).json()

        assert body["usage"]["completion_tokens"] == 1
        assert rig.decode[0].seen == []
        assert rig.is_at_rest()


async def test_end_of_text_at_the_first_token_never_reaches_decode(model_dir: Path) -> None:
    end = Tokenizer.load(model_dir).token_id(EOS)
    assert end is not None
    async with router_rig(model_dir, next_token=scripted([end])) as rig:
        choice = (await rig.complete("hello", max_tokens=9)).json()["choices"][0]

        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", None)
        assert rig.decode[0].seen == []


async def test_stop_token_is_named_counted_and_silent(model_dir: Path) -> None:
    script = ids_of(model_dir, "abc")
    async with router_rig(model_dir, next_token=scripted(script)) as rig:
        body = (await rig.complete("hello", max_tokens=9, stop_token_ids=[script[2]])).json()

        choice = body["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", script[2])
        assert body["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("include", [False, True])
async def test_stop_string_across_tokens_ends_the_request_everywhere(model_dir: Path, include: bool) -> None:
    script = ids_of(model_dir, "hello world, how are you today?")
    async with router_rig(model_dir, next_token=scripted(script)) as rig:
        response = await rig.complete(
            "x", max_tokens=300, stop=["w are y", "never"], include_stop_str_in_output=include
        )

        choice = response.json()["choices"][0]
        assert choice["text"] == "hello world, ho" + ("w are y" if include else "")
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "w are y")
        assert rig.service.counters.num_finished == 1
        await rig.service.close()
        assert rig.is_at_rest()


@pytest.mark.parametrize("stop", ["w are y", "l", "how are"])
@pytest.mark.parametrize("min_tokens", [0, 7])
async def test_stop_string_ends_the_answer_at_the_token_that_completes_it_however_many_come_at_once(
    model_dir: Path, stop: str, min_tokens: int
) -> None:
    script = ids_of(model_dir, "hello world, how are you today?")
    answers = []
    for tokens_per_step in (1, 4):
        async with router_rig(model_dir, next_token=scripted(script), tokens_per_step=tokens_per_step) as rig:
            body = (
                await rig.complete(
                    "x", max_tokens=300, stop=[stop], min_tokens=min_tokens, logprobs=1, return_token_ids=True
                )
            ).json()
            answers.append((body["choices"], body["usage"]))

    assert answers[1] == answers[0]
    assert answers[0][0][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("tokens_per_step", [1, 3])
async def test_stream_says_the_same_as_the_whole_answer(model_dir: Path, tokens_per_step: int) -> None:
    script = ids_of(model_dir, "日本 hello 🙂 the end")
    async with router_rig(model_dir, next_token=scripted(script), tokens_per_step=tokens_per_step) as rig:
        whole = (await rig.complete("x", max_tokens=len(script))).json()
        chunks = events(await rig.complete("x", max_tokens=len(script), stream=True))

        assert completion_text(chunks) == whole["choices"][0]["text"] == "日本 hello 🙂 the end"
        assert not any("\ufffd" in choice["text"] for chunk in chunks for choice in chunk["choices"])
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert all("usage" not in chunk for chunk in chunks)


async def test_stream_with_usage_ends_with_it(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        chunks = events(await rig.complete([5, 6], max_tokens=5, stream=True, stream_options={"include_usage": True}))

        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 5


async def test_running_usage_comes_with_every_chunk_where_wanted(model_dir: Path) -> None:
    script = ids_of(model_dir, "abcd")
    async with router_rig(model_dir, next_token=scripted(script)) as rig:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = events(await rig.complete([5, 6], max_tokens=4, stream=True, stream_options=options))

        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 4


async def test_running_usage_of_an_event_ends_with_its_own_tokens(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        options = {"continuous_usage_stats": True}
        fields = {"max_tokens": 6, "stop": ["never"], "return_token_ids": True, "ignore_eos": True}
        chunks = events(await rig.chat("x", stream=True, stream_options=options, **fields))

        num_tokens = 0
        for chunk in chunks:
            num_tokens += len(chunk["choices"][0].get("token_ids", ()))
            assert chunk["usage"]["completion_tokens"] == num_tokens
        assert chunks[0]["usage"]["completion_tokens"] == 0
        assert num_tokens == 6


async def test_streamed_token_ids_are_complete(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        chunks = events(await rig.complete([5, 6], max_tokens=7, stream=True, return_token_ids=True, seed=1))

        ids = [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids", [])]
        assert ids == [counting(rig.prefill[0].seen[0], position) for position in range(7)]
        assert chunks[0]["choices"][0]["prompt_token_ids"] == [5, 6]


async def test_first_event_of_each_choice_has_its_log_probabilities(model_dir: Path) -> None:
    script = ids_of(model_dir, "abc")
    async with router_rig(model_dir, next_token=scripted(script)) as rig:
        fields = {"stream": True, "return_token_ids": True, "logprobs": 1, "n": 2, "max_tokens": len(script)}
        choices = [chunk["choices"][0] for chunk in events(await rig.complete([5, 6], **fields))]

        for index in range(2):
            own = [choice for choice in choices if choice["index"] == index]
            assert own[0]["prompt_token_ids"] == [5, 6]
            assert not any("prompt_token_ids" in choice for choice in own[1:])
            assert all(choice["token_ids"] and choice["logprobs"]["tokens"] for choice in own)


async def test_prompt_ids_come_with_the_echo(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        fields = {"stream": True, "return_token_ids": True, "echo": True, "max_tokens": 2}
        choices = [chunk["choices"][0] for chunk in events(await rig.complete([5, 6], **fields))]

        assert [choice.get("prompt_token_ids") for choice in choices] == [[5, 6], None, None]


async def test_prompt_logprobs_are_null_where_nobody_asked(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        chat = (await rig.chat("x", max_tokens=1)).json()
        text = (await rig.complete("x", max_tokens=1, n=2)).json()

        assert chat["prompt_logprobs"] is None
        assert [choice["prompt_logprobs"] for choice in text["choices"]] == [None, None]


async def test_chat_renders_the_template_and_answers(model_dir: Path) -> None:
    script = ids_of(model_dir, "hello world")
    async with router_rig(model_dir, next_token=scripted(script)) as rig:
        messages = [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        ]
        response = await rig.client.post(
            "/v1/chat/completions", json={"messages": messages, "max_completion_tokens": len(script)}
        )

        body = response.json()
        assert body["object"] == "chat.completion"
        assert body["choices"][0]["message"] == {"role": "assistant", "content": "hello world", "refusal": None}
        prompt = Tokenizer.load(model_dir).decode(rig.prefill[0].seen[0].prompt_token_ids, skip_special_tokens=False)
        assert prompt == f"{BOS}[system] be brief{EOS}\n[user] one\ntwo{EOS}\n[assistant] "


async def test_chat_continues_the_final_message_where_wanted(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        messages = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one, two,"}]
        await rig.client.post(
            "/v1/chat/completions", json={"messages": messages, "max_tokens": 1, "continue_final_message": True}
        )

        prompt = Tokenizer.load(model_dir).decode(rig.prefill[0].seen[0].prompt_token_ids, skip_special_tokens=False)
        assert prompt.endswith("[assistant] one, two,")


async def test_chat_stream_begins_with_the_role(model_dir: Path) -> None:
    script = ids_of(model_dir, "hello world")
    async with router_rig(model_dir, next_token=scripted(script)) as rig:
        chunks = events(await rig.chat("x", max_tokens=len(script), stream=True, return_token_ids=True))

        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert chat_text(chunks) == "hello world"
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_chat_fills_the_context_unless_told_otherwise(model_dir: Path) -> None:
    async with router_rig(model_dir, max_model_len=64) as rig:
        usage = (await rig.chat("x", ignore_eos=True)).json()["usage"]

        assert usage["total_tokens"] == 64


async def test_batch_of_prompts_and_choices_is_answered_in_order(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        body = (
            await rig.client.post(
                "/v1/completions",
                json={"prompt": [[5], [6, 7]], "n": 2, "max_tokens": 3, "seed": 10, "return_token_ids": True},
            )
        ).json()

        requests = sorted(rig.prefill[0].seen, key=lambda request: request.request_id)
        assert [(request.prompt_token_ids, request.sampling.seed) for request in requests] == [
            ((5,), 10),
            ((5,), 11),
            ((6, 7), 10),
            ((6, 7), 11),
        ]
        expected = [[counting(request, position) for position in range(3)] for request in requests]
        assert [choice["token_ids"] for choice in body["choices"]] == expected
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 12)


async def test_streamed_batch_keeps_its_choices_apart(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        json = {"prompt": ["the fox", "a dog"], "max_tokens": 5, "seed": 0}
        whole = (await rig.client.post("/v1/completions", json=json)).json()
        chunks = events(await rig.client.post("/v1/completions", json={**json, "stream": True}))

        assert [completion_text(chunks, index) for index in (0, 1)] == [item["text"] for item in whole["choices"]]


async def test_prompt_is_echoed_where_wanted(model_dir: Path) -> None:
    script = ids_of(model_dir, " world")
    async with router_rig(model_dir, next_token=scripted(script)) as rig:
        json = {"prompt": "hello", "max_tokens": len(script), "echo": True}
        whole = (await rig.client.post("/v1/completions", json=json)).json()
        chunks = events(await rig.client.post("/v1/completions", json={**json, "stream": True}))

        assert whole["choices"][0]["text"] == completion_text(chunks) == "hello world"


async def test_drawn_seed_reaches_both_workers_and_a_given_one_is_kept(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        for seed in (None, None, 77, -2):
            await rig.complete("x", max_tokens=2, seed=seed)

        prefill = [request.sampling.seed for request in rig.prefill[0].seen]
        assert prefill == [request.sampling.seed for request in rig.decode[0].seen]
        assert prefill[0] != prefill[1]
        assert prefill[2:] == [77, 2**63 - 2]


async def test_seed_of_minus_one_is_none(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        for _ in range(2):
            await rig.complete("x", max_tokens=2, seed=-1, n=2)

        drawn = {request.sampling.seed for request in rig.prefill[0].seen}
        assert len(drawn) == 4
        assert not drawn & {0, 2**63 - 1}


async def test_all_sampling_parameters_reach_the_engine(model_dir: Path) -> None:
    parameters = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
        "repetition_penalty": 1.2,
        "min_tokens": 1,
        "ignore_eos": True,
    }
    async with router_rig(model_dir) as rig:
        await rig.complete("x", max_tokens=2, stop_token_ids=[3, 3, 4], priority=-2, cache_salt="a", **parameters)

        request = rig.prefill[0].seen[0]
        assert {name: getattr(request.sampling, name) for name in parameters} == parameters
        assert request.sampling.stop_token_ids == (3, 4)
        assert (request.priority, request.cache_salt) == (-2, "a")


async def test_prompt_is_truncated_from_the_left_where_wanted(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        await rig.complete([5, 6, 7, 8], max_tokens=1, truncate_prompt_tokens=2)

        assert rig.prefill[0].seen[0].prompt_token_ids == (7, 8)


@pytest.mark.parametrize(
    ("fields", "num_kept"),
    [({"max_tokens": 8}, 56), ({"max_completion_tokens": 8}, 56), ({}, 63), ({"max_completion_tokens": 63}, 1)],
)
async def test_chat_is_truncated_to_leave_room_for_its_answer(
    model_dir: Path, fields: dict[str, int], num_kept: int
) -> None:
    async with router_rig(model_dir, max_model_len=64) as rig:
        response = await rig.chat("the quick brown fox " * 20, truncate_prompt_tokens=-1, **fields)

        assert response.status_code == 200
        assert len(rig.prefill[0].seen[0].prompt_token_ids) == num_kept


@pytest.mark.parametrize(("max_tokens", "num_kept"), [(None, 48), (8, 56), (0, 63)])
async def test_text_is_truncated_to_leave_room_for_its_answer(
    model_dir: Path, max_tokens: int | None, num_kept: int
) -> None:
    async with router_rig(model_dir, max_model_len=64) as rig:
        await rig.complete([5] * 100, truncate_prompt_tokens=-1, max_tokens=max_tokens, echo=max_tokens == 0)

        assert len(rig.prefill[0].seen[0].prompt_token_ids) == num_kept


async def test_default_that_fills_the_context_leaves_the_prompt_as_it_is(model_dir: Path) -> None:
    settings = dataclasses.replace(FAST, default_max_tokens=1000)
    async with router_rig(model_dir, max_model_len=64, settings=settings) as rig:
        await rig.chat("the quick brown fox " * 20, truncate_prompt_tokens=-1)

        assert len(rig.prefill[0].seen[0].prompt_token_ids) == 63
