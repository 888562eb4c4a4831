"""What operators and probes ask of a live cluster, through Serve's proxy: resets, what runs, HEAD, OPTIONS, names."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray

from router.security import hash_key, new_key
from tests.support.cluster.cluster import ClusterProcess, assert_left_nothing, run_baton
from tests.support.cluster.http_completions import queue_of_work

USER, ADMIN = new_key(), new_key()
NUM_TOKENS = 80
NUM_STREAMED = 400
PROMPTS = [[3 + (7 * index + offset) % 250 for offset in range(160)] for index in range(10)]
CONFIG = {
    "dtype": "float32",
    "router_replicas": 2,
    "max_model_len": 512,
    "scheduler": {"max_num_seqs": 8},
    "cache": {"num_blocks": 64},
    "kv_transfer": {"connector": "chain", "chain": ["host", "nixl"], "host_bytes": 1 << 26},
    "security": {"admin_keys": [hash_key(ADMIN)]},
}


@pytest.fixture(scope="module")
def cluster(served_model: Path) -> Iterator[ClusterProcess]:
    """Two routers; the key on the command line, the names in a variable, the rest in a file."""
    running = ClusterProcess(
        {"model": str(served_model), **CONFIG},
        command=("serve", "--api-key", USER),
        environment={"BATON_SERVED_MODEL_NAME": "mine yours", "BATON_ADMIN_KEY": ADMIN},
    )
    try:
        running.wait_until_ready()
        yield running
        processes = running.processes()
        assert running.stop() == 0, running.log
        assert_left_nothing(running, processes)
    finally:
        running.close()


def client_of(cluster: ClusterProcess, key: str = ADMIN) -> httpx.AsyncClient:
    """A client that opens a connection for each request, so that both routers are asked."""
    limits = httpx.Limits(max_keepalive_connections=0)
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=cluster.url, headers=headers, limits=limits, timeout=120.0, trust_env=False)


async def complete(client: httpx.AsyncClient, prompt: list[int], **extra: Any) -> tuple[list[int], int]:
    """The tokens of an answer, and how many of its prompt's were cached."""
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    response = await client.post("/v1/completions", json={**body, **extra})
    assert response.status_code == httpx.codes.OK, response.text
    answer = response.json()
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def stream(client: httpx.AsyncClient, prompt: list[int], began: asyncio.Event) -> list[int]:
    """The tokens of a streamed answer; ``began`` is set when some of them are there."""
    body = {"prompt": prompt, "max_tokens": NUM_STREAMED, "temperature": 0, "ignore_eos": True}
    tokens: list[int] = []
    ask = {**body, "stream": True, "return_token_ids": True}
    async with client.stream("POST", "/v1/completions", json=ask) as response:
        assert response.status_code == httpx.codes.OK, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                tokens += choice.get("token_ids") or []
                if len(tokens) > 1:
                    began.set()
    return tokens


@asynccontextmanager
async def queue_behind(client: httpx.AsyncClient, asked: list[list[int]]) -> AsyncIterator[asyncio.Future[list[Any]]]:
    """Streams of these prompts that have begun, and work behind them that lasts as long as the block."""
    began = asyncio.Event()
    answers = asyncio.gather(*(stream(client, prompt, began) for prompt in asked))
    async with queue_of_work(client, max_tokens=NUM_STREAMED):
        await asyncio.wait((answers, asyncio.ensure_future(began.wait())), return_when=asyncio.FIRST_COMPLETED)
        yield answers


async def reset(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    """What each worker dropped."""
    response = await client.post("/reset_prefix_cache", json=body)
    assert response.status_code == httpx.codes.OK, response.text
    rows: list[dict[str, Any]] = response.json()["workers"]
    return rows


async def test_reset_drops_what_every_worker_has_cached(cluster: ClusterProcess) -> None:
    async with client_of(cluster) as client:
        first = [await complete(client, prompt) for prompt in PROMPTS]
        again = await complete(client, PROMPTS[-1])
        assert (again[0], again[1] > 0) == (first[-1][0], True)

        rows = await reset(client)

        assert [row["role"] for row in rows] == ["prefill", "decode"]
        assert all(row["dropped_blocks"] > 0 for row in rows)
        assert sum(row["dropped_host_blocks"] for row in rows) > 0, "the prompts do not fit into the cache"
        assert [await complete(client, prompt) for prompt in PROMPTS[-2:]] == [(tokens, 0) for tokens, _ in first[-2:]]
        rows = await reset(client)
        assert [row["dropped_host_blocks"] for row in rows] == [0, 0]


async def test_reset_under_load_is_refused_or_preempts_and_changes_no_token(cluster: ClusterProcess) -> None:
    asked = [prompt[:90] for prompt in PROMPTS[:6]]
    async with client_of(cluster) as client:
        undisturbed = [(await complete(client, prompt, max_tokens=NUM_STREAMED))[0] for prompt in asked]

        async with queue_behind(client, asked) as answers:
            num_preempted = num_resets = 0
            while not answers.done() and (num_preempted == 0 or num_resets < 4):
                rows = await reset(client, preempt_running=True)
                num_preempted += sum(row["preempted_requests"] for row in rows)
                num_resets += 1
            assert num_preempted > 0
            assert await answers == undisturbed
        status = (await client.get("/status")).json()
        for row in (*status["pools"]["prefill"], *status["pools"]["decode"]):
            assert row["counters"]["num_integrity_failures"] == 0

        async with queue_behind(client, asked) as answers:
            refused = await client.post("/reset_prefix_cache")
            assert refused.status_code == httpx.codes.CONFLICT, refused.text
            error = refused.json()["error"]
            assert (error["code"], "decode worker " in error["message"]) == ("prefix_cache_in_use", True)
            assert await answers == undisturbed


async def test_server_info_tells_what_runs_and_no_secret(cluster: ClusterProcess) -> None:
    async with client_of(cluster) as client, client_of(cluster, USER) as user:
        response = await client.get("/server_info")
        refused = [await user.get("/server_info"), await user.post("/reset_prefix_cache")]
        version = (await user.get("/version")).json()

    told = response.json()
    assert (told["models"], told["config"]["served_model_name"]) == (["mine", "yours"], ["mine", "yours"])
    assert told["config"]["decode"]["scheduler"]["max_num_seqs"] == CONFIG["scheduler"]["max_num_seqs"]  # type: ignore[index]
    assert told["config"]["port"] == cluster.port
    assert told["versions"]["ray"] == ray.__version__
    assert {key: told[key] for key in version} == version
    assert [(row["role"], row["num_blocks"], row["dtype"]) for row in told["workers"]] == [
        ("prefill", 64, "float32"),
        ("decode", 64, "float32"),
    ]
    assert told["config"]["security"]["api_keys"] == told["config"]["security"]["admin_keys"] == ["(hidden)"]
    assert not any(secret in response.text for secret in (USER, ADMIN, hash_key(USER), hash_key(ADMIN)))
    assert [answer.status_code for answer in refused] == [httpx.codes.FORBIDDEN] * 2


async def test_probes_are_answered_through_the_proxy(cluster: ClusterProcess) -> None:
    async with client_of(cluster) as client:
        for path in ("/", "/health", "/healthz", "/v1/health", "/v1/models", "/metrics", "/ready"):
            got, asked, options = [await client.request(method, path) for method in ("GET", "HEAD", "OPTIONS")]

            assert (asked.status_code, asked.content) == (got.status_code, b""), path
            assert asked.headers["content-type"] == got.headers["content-type"], path
            assert (options.status_code, options.headers["allow"]) == (204, "GET, HEAD, OPTIONS"), path
        assert (await client.head("/v1/completions")).headers["allow"] == "OPTIONS, POST"


async def test_both_names_are_served_and_answers_carry_the_first(cluster: ClusterProcess) -> None:
    async with client_of(cluster, USER) as client:
        listed = [card["id"] for card in (await client.get("/v1/models")).json()["data"]]
        answers = [
            (await client.post("/v1/completions", json={"model": name, "prompt": "a", "max_tokens": 1})).json()["model"]
            for name in ("mine", "yours")
        ]

    assert (listed, answers) == (["mine", "yours"], ["mine", "mine"])


async def test_key_of_the_command_line_is_seen_in_no_process_and_no_file(cluster: ClusterProcess) -> None:
    command, *others = cluster.processes()
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60.0, trust_env=False) as client:
        assert (await client.get("/v1/models")).status_code == httpx.codes.UNAUTHORIZED

    assert len(others) > 5
    assert not any(USER in argument for process in (command, *others) for argument in process.cmdline())
    inherited = {name for process in others for name in process.environ() if name.startswith("BATON_")}
    assert {name for name in inherited if not name.startswith("BATON_PROXY_")} == set()
    files = [file for file in cluster.folder.rglob("*") if file.is_file() and not file.is_symlink()]
    assert len(files) > 5
    assert [file for file in files if any(key.encode() in file.read_bytes() for key in (USER, ADMIN))] == []


@pytest.mark.parametrize("suffix", ["/v1", "/v1/", "/"])
async def test_commands_take_the_url_that_clients_have(cluster: ClusterProcess, suffix: str) -> None:
    shown = await asyncio.to_thread(
        run_baton, "status", environment={"BATON_URL": cluster.url + suffix, "BATON_ADMIN_KEY": ADMIN}
    )

    assert (shown.returncode, "model mine" in shown.stdout) == (0, True), shown.stderr
