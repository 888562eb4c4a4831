"""Draft tokens over HTTP: clusters of one unified worker, with and without drafts, measured in turn in one run.

    python -m benchmarks.speculation_http --peer vllm llama-cpp --json benchmarks/results/speculation_http.json

Each cluster's decode worker computes every prompt itself, with all threads; the clusters run at the same time, and are
never asked at the same time. Sides: ``none``, ``ngram``, ``suffix``, and with ``--peer`` also vLLM's CPU build and
llama.cpp (at batch 1), with their look-ups in the prompt (``vllm_ngram``, ``llama_cpp_lookup``) and without. The model
quotes (benchmarks/quoting_llama.py). Texts, all completions of token ids but the last: ``quoting``, answers that say
the prompt again with an edit about every 30 tokens; ``looping``, greedy answers, which say it without one; ``new``,
hardly a token of which can be foreseen; ``edited``, chats as new, which the side ``none`` answers with a prediction
(``prediction``) and without. Tokens a second are those of whole answers, prompts included. ``ratio`` is the median of
the rounds' ``ratios`` to the side without drafts. Two servers of one kind differ by some percent for as long as they
live: hence several starts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import torch
import yaml

from benchmarks.arguments import count
from benchmarks.edited_answers import before_edits
from benchmarks.peers.llama_cpp_server import served_llama_cpp
from benchmarks.peers.process import IDLE_PAUSE_S
from benchmarks.peers.vllm_server import served_vllm
from benchmarks.quoting_llama import DOCUMENT_TOKENS, document_from, write_quoting_llama
from benchmarks.random_llama import VOCAB_SIZE
from benchmarks.report import Row, add_json_option, publish
from benchmarks.served import served_cluster

TEXTS: Final = ("quoting", "looping", "new", "edited")
TEMPERATURES: Final = {"quoting": 1.0, "looping": 0.0, "new": 2.0, "edited": 2.0}
METHODS: Final = ("none", "ngram", "suffix")
PROMPT_TOKENS: Final = DOCUMENT_TOKENS
MAX_MODEL_LEN: Final = 1024
SCHEDULER: Final = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
PEER_NGRAM: Final = '{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":5,"prompt_lookup_min":2}'
VLLM: Final = {"vllm": (), "vllm_ngram": (f"--speculative-config={PEER_NGRAM}",)}
LLAMA_CPP: Final = {"llama_cpp": False, "llama_cpp_lookup": True}
PLAIN: Final = {"vllm_ngram": "vllm", "llama_cpp_lookup": "llama_cpp"}
"""The side that a peer's look-up is compared with; Baton's sides are compared with ``none``."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The result of one side for a text, once."""

    tokens_per_s: float
    texts: list[str]
    num_accepted: int


@contextlib.contextmanager
def _served_baton(model: Path, method: str, args: argparse.Namespace) -> Iterator[str]:
    config = {
        "model": str(model),
        "served_model_name": "random-llama",
        "dtype": args.dtype,
        "device": "cpu",
        "max_model_len": MAX_MODEL_LEN,
        "scheduler": SCHEDULER,
        "cache": {"kv_cache_bytes": 1 << 29, "enable_prefix_caching": False},
        "speculative": {"method": method},
        "roles": "fixed",
        "prefill": {"num_threads": 1},
        "decode": {"num_threads": args.threads},
        "router": {"local_prefill_tokens": 1 << 20},
    }
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(config, file)
        file.flush()
        with served_cluster(["--config", file.name]) as url:
            yield url


def _words(generator: random.Random) -> list[int]:
    return [generator.randrange(3, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]


def _prompt(text: str, generator: random.Random) -> list[int]:
    """The document, from some place on, if answers quote it."""
    return document_from(generator.randrange(DOCUMENT_TOKENS)) if text in ("quoting", "looping") else _words(generator)


def _bodies(text: str, *, batch: int, number: int, max_tokens: int, predictions: Sequence[str]) -> list[dict[str, Any]]:
    """The requests of a round; the same for each side."""
    generator = random.Random(f"{text} {number}")
    bodies: list[dict[str, Any]] = []
    for index in range(batch):
        prompt = _prompt(text, generator)
        body: dict[str, Any] = {
            "model": "random-llama",
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": TEMPERATURES[text],
            "seed": 1000 * number + index,
        }
        if text == "edited":
            body["messages"] = [{"role": "user", "content": _spelled(prompt)}]
        else:
            body["prompt"] = prompt
        if predictions:
            body["prediction"] = {"type": "content", "content": predictions[index]}
        bodies.append(body)
    return bodies


def _spelled(token_ids: Sequence[int]) -> str:
    return " ".join(f"w{token_id}" for token_id in token_ids)


def _prediction_of(text: str) -> str:
    """The prediction of a caller who knows the answer as it was before an edit."""
    return _spelled(before_edits([int(word.removeprefix("w")) for word in text.split()]))


async def _ask(url: str, bodies: Sequence[dict[str, Any]]) -> Asked:
    """Send all requests at once."""

    async def post(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        response = await client.post(f"{url}{path}", json=body)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer

    async with httpx.AsyncClient(timeout=300, trust_env=False) as client:
        started_s = time.perf_counter()
        answers = await asyncio.gather(*(post(client, body) for body in bodies))
        took_s = time.perf_counter() - started_s
    details = [answer["usage"].get("completion_tokens_details") or {} for answer in answers]
    choices = [answer["choices"][0] for answer in answers]
    return Asked(
        sum(answer["usage"]["completion_tokens"] for answer in answers) / took_s,
        [choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices],
        sum(detail.get("accepted_prediction_tokens") or 0 for detail in details),
    )


def _round(urls: dict[str, str], text: str, *, batch: int, number: int, args: argparse.Namespace) -> dict[str, Asked]:
    """Measure every side once. The answers to ``edited`` without a prediction become the predictions."""
    done: dict[str, Asked] = {}
    sides: list[tuple[str, str]] = list(urls.items())
    if batch > 1:  # llama.cpp's binding answers one after another
        sides = [(side, url) for side, url in sides if side not in LLAMA_CPP]
    if text == "edited":
        sides = [("none", urls["none"]), ("prediction", urls["none"])]
    elif number % 2:
        sides.reverse()
    for side, url in sides:
        predictions = [_prediction_of(answer) for answer in done["none"].texts] if side == "prediction" else ()
        bodies = _bodies(text, batch=batch, number=number, max_tokens=args.max_tokens, predictions=predictions)
        if side in VLLM:  # vLLM's CPU build ends when it draws with a seed: "CPU Generator does not use offset"
            bodies = [{name: value for name, value in body.items() if name != "seed"} for body in bodies]
        done[side] = asyncio.run(_ask(url, bodies))
        if side in VLLM:
            time.sleep(IDLE_PAUSE_S)
    return done


def _rows(rounds: Sequence[dict[str, Asked]], text: str, batch: int) -> list[Row]:
    """The rows of a text over the rounds of all starts."""
    rows: list[Row] = []
    for side in rounds[0]:
        own = [done for done in rounds if side in done]
        plain = PLAIN.get(side, side if side in PLAIN.values() else "none")
        ratios = [done[side].tokens_per_s / done[plain].tokens_per_s for done in own]
        detail: dict[str, float | str] = {"ratio": statistics.median(ratios), "ratios": _spelled_ratios(ratios)}
        if side == "prediction":
            detail["accepted_prediction_tokens"] = statistics.median(done[side].num_accepted for done in own) / batch
            assert all(done[side].texts == done[plain].texts for done in own), "a prediction changed an answer"
        rate = statistics.median(done[side].tokens_per_s for done in own)
        rows.append(Row(name=f"http/{side}/{text}/{batch}", value=rate, unit="tokens/s", detail=detail))
    return rows


def _spelled_ratios(ratios: Sequence[float]) -> str:
    """The ratios of every round, so that a reader sees how much they vary."""
    return " ".join(f"{ratio:.2f}" for ratio in ratios)


@contextlib.contextmanager
def _started(model: Path, start: int, args: argparse.Namespace) -> Iterator[dict[str, str]]:
    """The URLs of all sides, in another order for each start; peers only run in the first one."""
    turn = start % len(METHODS)
    with contextlib.ExitStack() as stack:
        methods = METHODS[turn:] + METHODS[:turn]
        urls = {method: stack.enter_context(_served_baton(model, method, args)) for method in methods}
        peers = args.peer if start == 0 else ()
        for name, options in VLLM.items() if "vllm" in peers else ():
            limits = {"max_model_len": MAX_MODEL_LEN, **SCHEDULER}
            server = served_vllm(model, {}, dtype=args.dtype, num_threads=args.threads, limits=limits, options=options)
            urls[name] = stack.enter_context(server)
        for name, lookup in LLAMA_CPP.items() if "llama-cpp" in peers else ():
            peer = served_llama_cpp(model, num_threads=args.threads, context_tokens=MAX_MODEL_LEN, lookup=lookup)
            urls[name] = stack.enter_context(peer)
        yield urls


def main() -> None:
    """Parse, start the servers, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=count, nargs="+", default=[1, 32])
    parser.add_argument("--texts", choices=TEXTS, nargs="+", default=list(TEXTS))
    parser.add_argument(
        "--peer",
        choices=("vllm", "llama-cpp"),
        nargs="+",
        default=[],
        help="peers to measure, each with and without look-up",
    )
    parser.add_argument(
        "--starts",
        type=count,
        default=3,
        help="number of starts of all servers; servers of one kind differ between starts",
    )
    parser.add_argument("--rounds", type=count, default=2, help="number of rounds for each start")
    parser.add_argument("--max-tokens", type=count, default=192)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=count, default=torch.get_num_threads())
    add_json_option(parser)
    args = parser.parse_args()
    texts = [text for text in TEXTS if text in args.texts]
    rounds: dict[tuple[str, int], list[dict[str, Asked]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        write_quoting_llama(model, torch.float32 if args.dtype == "float32" else torch.bfloat16)
        for start in range(args.starts):
            with _started(model, start, args) as urls:
                for batch in args.batches:
                    for text in texts:
                        # One before them is not counted.
                        numbers = range(start * args.rounds, (start + 1) * args.rounds + 1)
                        done = [_round(urls, text, batch=batch, number=number, args=args) for number in numbers]
                        rounds.setdefault((text, batch), []).extend(done[1:])
    rows = [row for (text, batch), done in rounds.items() for row in _rows(done, text, batch)]
    publish(
        rows,
        packages=("torch", "ray", "nixl"),
        json_file=args.json,
        title=f"draft tokens over HTTP: a Llama that quotes, 125 M, {args.dtype}, {PROMPT_TOKENS} tokens in",
    )


if __name__ == "__main__":
    main()
