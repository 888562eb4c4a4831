"""The closed loop with which Baton and its peer are measured: what it sends and reads, and the figures that it
computes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.closed_load import ClosedFigures, ClosedLoad, figures, send_closed
from benchmarks.cpu_watch import ENGINE_THREADS, MARK, CpuWatch, spent
from benchmarks.serving_peer import Rounds, baton_config, cpu_rows, ratio_rows, side_rows
from benchmarks.standing_still import standing_still
from benchmarks.token_stream import Answer, AnswerParser, Arrival, LoadError, StreamClient
from cluster.config.config import BatonConfig

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
PROMPT_TOKENS, OUTPUT_TOKENS = 6, 8


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(*token_ids: int) -> bytes:
    body = {"choices": [{"index": 0, "text": "x" * len(token_ids), "token_ids": token_ids}]}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def streamed(num_tokens: int) -> bytes:
    return HEAD + b"".join(chunk(event(token)) for token in range(num_tokens)) + chunk(DONE) + chunk(b"")


@dataclass
class Seen:
    """The requests that a server received, and the number of connections."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_connections: int = 0


@asynccontextmanager
async def completions_server(
    reply: Callable[[dict[str, Any]], bytes], *, num_together: int = 1
) -> AsyncIterator[tuple[str, Seen]]:
    """Answers with the bytes of ``reply``, none before ``num_together`` requests are there; hangs up without any."""
    seen = Seen()
    are_together = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.num_connections += 1
        answer = b"any"
        while answer:
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            except asyncio.IncompleteReadError:
                break
            length = int(head.partition("content-length:")[2].split()[0])
            body = json.loads(await reader.readexactly(length))
            seen.bodies.append(body)
            if len(seen.bodies) == num_together:
                are_together.set()
            await asyncio.wait_for(are_together.wait(), 60)
            answer = reply(body)
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", seen


def whole(body: dict[str, Any]) -> bytes:
    return streamed(body["max_tokens"])


async def ask(reply: Callable[[dict[str, Any]], bytes]) -> Answer:
    async with completions_server(reply) as (url, _), StreamClient(url) as client:
        return await client.ask([1] * PROMPT_TOKENS, OUTPUT_TOKENS)


def test_tokens_are_counted_wherever_the_bytes_are_cut() -> None:
    data = HEAD + chunk(event(1) + event(2, 3)[:9]) + chunk(event(2, 3)[9:]) + chunk(DONE) + chunk(b"")
    for cut in range(len(data) + 1):
        parser = AnswerParser()
        num_tokens = parser.feed(data[:cut]) + parser.feed(data[cut:])
        assert (num_tokens, parser.is_complete, parser.error) == (3, True, None), cut


def test_every_client_has_one_request_in_flight_with_a_prompt_of_its_own() -> None:
    ticks = itertools.count()
    load = ClosedLoad(
        concurrency=4,
        window_s=20.0,
        num_prompt_tokens=PROMPT_TOKENS,
        num_output_tokens=OUTPUT_TOKENS,
        vocab_size=32_000,
        seed="0",
    )

    async def scenario() -> tuple[Seen, int]:
        async with completions_server(whole, num_together=4) as (url, seen):
            course = await send_closed(url, load, clock=lambda: float(next(ticks)))
            return seen, len(course.answers)

    seen, num_measured = asyncio.run(scenario())

    assert seen.num_connections == 4
    prompts = {tuple(body["prompt"]) for body in seen.bodies}
    assert len(prompts) == len(seen.bodies) == 4 + num_measured
    assert {len(prompt) for prompt in prompts} == {PROMPT_TOKENS}
    lengths = sorted(body["max_tokens"] for body in seen.bodies)
    assert lengths == [2, 4, 6] + [OUTPUT_TOKENS] * (1 + num_measured)
    assert num_measured >= 19
    assert all(body["stream"] and body["ignore_eos"] and body["temperature"] == 0 for body in seen.bodies)


def test_refusal_is_reported_in_the_words_of_the_server() -> None:
    words = b'{"error": {"message": "the prompt is too long"}}'
    refusal = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%s" % (len(words), words)

    with pytest.raises(LoadError, match=r"400: .*the prompt is too long"):
        asyncio.run(ask(lambda body: refusal))


def test_error_in_the_middle_of_an_answer_is_reported() -> None:
    failure = HEAD + chunk(event(1)) + chunk(b'data: {"error": {"message": "worker lost"}}\n\n') + chunk(b"")

    with pytest.raises(LoadError, match="worker lost"):
        asyncio.run(ask(lambda body: failure))


def test_answer_of_another_length_is_no_answer() -> None:
    with pytest.raises(LoadError, match="7 of 8 tokens"):
        asyncio.run(ask(lambda body: streamed(body["max_tokens"] - 1)))


def test_closed_connection_is_no_answer() -> None:
    with pytest.raises(LoadError, match="closed after 0 tokens"):
        asyncio.run(ask(lambda body: b""))


def test_connection_that_the_server_closes_is_opened_again() -> None:
    closing = HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")

    async def scenario() -> int:
        def reply(body: dict[str, Any]) -> bytes:
            return whole(body).replace(HEAD, closing)

        async with completions_server(reply) as (url, seen), StreamClient(url) as client:
            for _ in range(2):
                assert (await client.ask([1], 3)).num_tokens == 3
            return seen.num_connections

    assert asyncio.run(scenario()) == 2


def test_figures_are_those_of_the_window() -> None:
    answers = [
        Answer(sent_s=9.0, arrivals=[Arrival(at_s=9.5, num_tokens=1), Arrival(at_s=10.0, num_tokens=1)]),
        Answer(
            sent_s=10.0,
            arrivals=[
                Arrival(at_s=10.25, num_tokens=1),
                Arrival(at_s=10.75, num_tokens=2),
                Arrival(at_s=11.75, num_tokens=1),
                Arrival(at_s=12.0, num_tokens=4),
            ],
        ),
        Answer(sent_s=12.0, arrivals=[Arrival(at_s=12.5, num_tokens=1), Arrival(at_s=13.0, num_tokens=1)]),
    ]

    seen = figures(answers, 10.0, 12.0)

    assert seen.tokens_per_s == (1 + 1 + 2 + 1) / 2.0
    assert seen.num_requests == 1
    assert seen.ttft_p50_ms == 250
    assert seen.itl_p50_ms == 375  # of 0.5, twice 0.25, and 1.0 s
    assert seen.tpot_p50_ms == 250
    assert seen.tokens_per_read == 5 / 4


def test_window_without_an_answer_is_refused() -> None:
    answers = [Answer(sent_s=9.0, arrivals=[Arrival(at_s=9.5, num_tokens=1), Arrival(at_s=9.9, num_tokens=1)])]

    with pytest.raises(LoadError, match=r"window of 2\.0 s"):
        figures(answers, 10.0, 12.0)


def seen_figures(tokens_per_s: float, ttft_ms: float, itl_ms: float, **cpu_ms: float) -> ClosedFigures:
    return ClosedFigures(
        tokens_per_s=tokens_per_s,
        num_requests=10,
        ttft_p50_ms=ttft_ms,
        itl_p50_ms=itl_ms,
        tpot_p50_ms=itl_ms,
        tokens_per_read=1.0,
        cpu_ms_per_token=cpu_ms,
    )


def test_ratios_above_one_mean_that_the_cluster_is_faster() -> None:
    closed = {
        ("unified", 8): [seen_figures(300, 20, 10), seen_figures(200, 30, 12), seen_figures(250, 25, 11)],
        ("vllm", 8): [seen_figures(200, 40, 11), seen_figures(100, 50, 10), seen_figures(250, 60, 22)],
    }

    at_rest = [{"router": 0.01}, {"router": 0.02}, {"router": 0.04, "gcs": 0.01}]
    rounds = Rounds(closed=closed, idle_s={"unified": at_rest, "vllm": [{"EngineCore": 0.001}]})
    ratios = {row.name: row for row in ratio_rows("float32", rounds, "unified", [8])}
    sides = {row.name: row.value for row in side_rows("float32", rounds)}

    assert sides["unified/tokens_per_s/float32/8"] == 250
    assert sides["unified/idle_cpu/float32"] == pytest.approx(2.0)
    assert sides["vllm/itl_p50_ms/float32/8"] == 11
    assert {name: row.value for name, row in ratios.items()} == {
        "ratio/http/unified/float32/8": 300 / 200,
        "ratio/http_ttft/unified/float32/8": 40 / 20,
        "ratio/http_itl/unified/float32/8": 11 / 10,
    }
    assert ratios["ratio/http/unified/float32/8"].detail == {"lowest": 1.0, "highest": 2.0}


def test_cpu_outside_the_engines_is_all_but_the_threads_that_compute() -> None:
    cases = [
        replace(seen_figures(200, 20, 10), cpu_ms_per_token={ENGINE_THREADS: 4.0, "router": 0.3}),
        replace(seen_figures(100, 20, 10), cpu_ms_per_token={ENGINE_THREADS: 3.0, "router": 0.2, "gcs": 0.2}),
    ]

    rows = {row.name: row for row in cpu_rows("default", "float32/8", cases, at_rest_ms=20.0)}

    assert rows["default/cpu_ms_per_token/float32/8"].value == pytest.approx((4.3 + 3.4) / 2)
    assert rows["default/cpu_ms_per_token/float32/8"].detail == pytest.approx(
        {ENGINE_THREADS: 3.5, "router": 0.25, "gcs": 0.1}
    )
    assert rows["default/cpu_ms_outside_engines/float32/8"].value == pytest.approx((0.3 + 0.4) / 2)
    assert rows["default/cpu_ms_above_rest/float32/8"].value == pytest.approx((0.3 - 0.1 + 0.4 - 0.2) / 2)
    assert len(cpu_rows("vllm", "float32/8", cases, at_rest_ms=1.0)) == 1, "its threads have no names"


@pytest.mark.parametrize(("side", "decode_threads"), [("default", 1), ("fixed", 1), ("unified", 2)])
def test_cluster_beside_the_peer_computes_with_two_threads(side: str, decode_threads: int) -> None:
    config = BatonConfig.model_validate(baton_config(side, Path("/model"), "bfloat16"))

    prefill = config.engine_config("prefill", model=Path("/model"), num_threads=1)
    decode = config.engine_config("decode", model=Path("/model"), num_threads=1)
    assert (config.prefill_replicas, config.decode_replicas) == (1, 1)
    assert (prefill.model.num_threads, decode.model.num_threads) == (1, decode_threads)
    borrows = [sharing is not None and sharing.borrows for sharing in map(config.core_sharing, ("prefill", "decode"))]
    assert borrows == [side == "default"] * 2
    assert (prefill.model.dtype, decode.model.dtype) == ("bfloat16", "bfloat16")
    assert decode.scheduler.max_num_seqs == 64
    assert (config.router.local_prefill_tokens > 1024) is (side == "unified")


def test_process_that_a_server_starts_while_it_is_stopped_stands_still_too() -> None:
    class LateChild(CpuWatch):
        """Its first look comes before the server has started its child."""

        def processes(self) -> set[psutil.Process]:
            looks.append(super().processes())
            return {psutil.Process(parent.pid)} if len(looks) == 1 else looks[-1]

    looks: list[set[psutil.Process]] = []
    command = ["sh", "-c", "exec 3<&0; cat <&3 & echo started; wait"]
    environ = {**os.environ, MARK: "late"}
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"started\n"
            with standing_still([LateChild("late")]):
                states = [process.status() for process in CpuWatch("late").processes()]
        finally:
            parent.communicate()

    assert states == [psutil.STATUS_STOPPED] * 2


def test_servers_stand_still_while_another_has_its_turn() -> None:
    def marked(name: str) -> subprocess.Popen[bytes]:
        command = ["sh", "-c", "exec 3<&0; cat <&3 & cat; wait"]  # both read until their input ends
        return subprocess.Popen(command, env={**os.environ, MARK: name}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def states(name: str) -> set[str]:
        return {process.status() for process in CpuWatch(name).processes()}

    def look() -> None:
        with standing_still([CpuWatch("waits")]):
            seen.append((states("waits"), states("works")))
            raise RuntimeError

    seen: list[tuple[set[str], set[str]]] = []
    with marked("waits") as waits, marked("works") as works:
        try:
            with pytest.raises(RuntimeError):
                look()
            seen.append((states("waits"), states("works")))
        finally:
            waits.communicate()
            works.communicate()

    during, after = seen
    assert during[0] == {psutil.STATUS_STOPPED}
    assert psutil.STATUS_STOPPED not in during[1] | after[0] | after[1]
    assert after[0]


def test_cpu_of_marked_processes_is_counted_with_the_engines_threads_apart() -> None:
    code = """
import threading, time
from engine.frontend.os_threads import os_thread_name
def spin(until_s):
    while time.thread_time() < until_s: pass
def compute():
    with os_thread_name("engine decode"):
        spin(0.2)
        print("done", flush=True); input()
thread = threading.Thread(target=compute); thread.start()
spin(0.1); thread.join()
"""
    environment = {**os.environ, MARK: "this one"}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        seen = CpuWatch("this one").take()
        process.communicate("\n")

    assert seen[ENGINE_THREADS] >= 0.15
    assert sum(seen.values()) > seen[ENGINE_THREADS]
    assert CpuWatch("this one").take() == {}
    assert spent({"a": 1.0, "b": 2.0}, {"a": 1.5, "b": 4.0, "c": 1.0}) == {"b": 2.0, "c": 1.0, "a": 0.5}
