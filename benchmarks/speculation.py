"""What draft tokens gain and cost: output per second with and without them, in turn.

    python -m benchmarks.speculation --json benchmarks/results/speculation.json
    python -m benchmarks.speculation --quoting --json benchmarks/results/speculation_quoting.json

Engines of the 125 M random Llama, one for each side (the methods ``none``, ``ngram`` and ``suffix``, with as many
drafts as pay, and ``prediction``), answer the same requests in turn, several rounds. Texts: ``looping``, greedy
answers, which repeat themselves; ``again``, answers that were given before, word by word, as retries and loops of
agents do; ``new``, tokens drawn from the whole vocabulary, of which hardly two come again; ``misleading``, tokens
drawn from eight, so that every place looks like an earlier one and goes on in another way; ``edited`` and ``wrong``,
as ``new``, but the side ``prediction``, an engine without a method, gets each answer with an edit every 24 tokens as
a prediction, or one that is all wrong. Rows: ``<side>/<text>/<batch>`` in tokens a second (medians of rounds), with
``ratio`` to the side ``none`` of the same round and ``accepted``, the drafts of a step and request that were right.

``--sides none draft_model`` measures a draft model of two layers beside a model whose other layers do little
(benchmarks/drafted_llama.py): some 7 in 10 of its greedy drafts are right.

``--quoting`` takes the model of benchmarks/quoting_llama.py and the texts ``quoting``, answers that say the prompt
again with an edit about every 30 tokens, and ``new``. Over HTTP: benchmarks/speculation_http.py.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, get_args

import torch

from benchmarks.arguments import count
from benchmarks.drafted_llama import write_draft_model, write_worded_llama
from benchmarks.edited_answers import before_edits
from benchmarks.quoting_llama import DOCUMENT_TOKENS, document_from, write_quoting_llama
from benchmarks.random_llama import VOCAB_SIZE
from benchmarks.report import Row, add_json_option, publish
from engine.build import build_engine
from engine.contract.config import (
    CacheConfig,
    EngineConfig,
    ModelConfigSource,
    SchedulerConfig,
    SpeculativeConfig,
    SpeculativeMethod,
)
from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.token_ids import TokenIds
from engine.frontend.engine_core import EngineCore

Text = Literal["looping", "again", "new", "misleading", "edited", "wrong", "quoting"]
Side = SpeculativeMethod | Literal["prediction"]

PREDICTION: Final = "prediction"
SIDES: Final[tuple[Side, ...]] = (*get_args(SpeculativeMethod), PREDICTION)
USUAL_SIDES: Final[tuple[Side, ...]] = ("none", "ngram", "suffix", PREDICTION)
TEXTS: Final[tuple[Text, ...]] = get_args(Text)
QUOTING_TEXTS: Final[tuple[Text, ...]] = ("quoting", "new")
PROMPT_TOKENS = DOCUMENT_TOKENS
TEMPERATURES: dict[Text, float] = {"looping": 0.0, "again": 0.2, "misleading": 2.0}
FEW_TOKENS = tuple(range(100, 108))


@dataclass(frozen=True)
class Round:
    """The work of one engine in one round."""

    tokens_per_s: float
    num_accepted: int
    num_steps: int
    answers: dict[str, list[int]]


class Engine:
    """An engine with one method of drafting, and its clock."""

    def __init__(self, model: Path, draft_model: Path, side: Side, args: argparse.Namespace) -> None:
        method: SpeculativeMethod = "none" if side == PREDICTION else side
        self.core: EngineCore = build_engine(
            EngineConfig(
                model=ModelConfigSource(path=model, device="cpu", dtype=args.dtype, num_threads=args.threads),
                cache=CacheConfig(kv_cache_bytes=1 << 29, prefault=True, enable_prefix_caching=False),
                scheduler=SchedulerConfig(
                    max_model_len=1024, max_num_batched_tokens=4096, max_num_seqs=max(args.batches)
                ),
                speculative=SpeculativeConfig(
                    method=method, draft_model=draft_model if method == "draft_model" else None
                ),
            )
        ).core

    def answer(self, requests: list[GenerateRequest]) -> Round:
        """Answer all requests; measures from when each has its first token until the end."""
        core = self.core
        for request in requests:
            core.add_request(request)
        answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
        waiting = {request.request_id for request in requests}
        while waiting:
            for delta in core.step().deltas():
                waiting.discard(delta.request_id)
                answers[delta.request_id] += delta.token_ids
        before, started = core.stats(), time.perf_counter()
        while core.has_unfinished():
            for delta in core.step().deltas():
                answers[delta.request_id] += delta.token_ids
        took_s = time.perf_counter() - started
        after = core.stats()
        return Round(
            tokens_per_s=(after.scheduler.num_generated_tokens - before.scheduler.num_generated_tokens) / took_s,
            num_accepted=after.scheduler.num_accepted_draft_tokens - before.scheduler.num_accepted_draft_tokens,
            num_steps=after.num_steps - before.num_steps,
            answers=answers,
        )


def requests_of(
    text: Text, *, batch: int, number: int, max_tokens: int, quoting: bool = False
) -> list[GenerateRequest]:
    """Requests that lead to such answers. Rounds have different requests, unless the texts are meant to repeat."""
    round_number = 0 if text == "again" else number
    generator = torch.Generator().manual_seed(1000 * TEXTS.index(text) + round_number)
    requests: list[GenerateRequest] = []
    for index in range(batch):
        prompt = torch.randint(3, VOCAB_SIZE, (PROMPT_TOKENS,), generator=generator).tolist()
        if text == "quoting":
            prompt = document_from(prompt[0])
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            temperature=2.0 if quoting and text == "new" else TEMPERATURES.get(text, 1.0),
            seed=1000 * round_number + index,
            allowed_token_ids=FEW_TOKENS if text == "misleading" else None,
        )
        name = f"{text}/{batch}/{number}/{index}"
        requests.append(GenerateRequest(request_id=name, prompt_token_ids=TokenIds.of(prompt), sampling=sampling))
    return requests


def with_predictions(
    requests: list[GenerateRequest], text: Text, answers: dict[str, list[int]]
) -> list[GenerateRequest]:
    """The predictions that callers send. The kind of text determines how good they are."""
    if text not in ("edited", "wrong"):
        return requests
    known = {name: before_edits(answer) if text == "edited" else answer[::-1] for name, answer in answers.items()}
    return [replace(request, prediction_token_ids=TokenIds.of(known[request.request_id])) for request in requests]


def measure(engines: dict[Side, Engine], text: Text, batch: int, args: argparse.Namespace) -> list[Row]:
    """Run rounds of all engines in turn, after one that does not count."""
    sides = [side for side in engines if (side in ("none", PREDICTION)) or text not in ("edited", "wrong")]
    sides = [side for side in sides if side != PREDICTION or text in ("edited", "wrong", "new")]
    rounds: dict[Side, list[Round]] = {side: [] for side in sides}
    for number in range(args.rounds + 1):
        plain: dict[str, list[int]] = {}
        for side in sides:
            requests = requests_of(text, batch=batch, number=number, max_tokens=args.max_tokens, quoting=args.quoting)
            done = engines[side].answer(with_predictions(requests, text, plain) if side == PREDICTION else requests)
            plain = plain or done.answers
            if number:
                rounds[side].append(done)
    rows: list[Row] = []
    for method, found in rounds.items():
        ratios = [one.tokens_per_s / plain.tokens_per_s for one, plain in zip(found, rounds["none"], strict=True)]
        accepted = statistics.median(one.num_accepted / one.num_steps / batch for one in found)
        detail: dict[str, float | str] = {"ratio": statistics.median(ratios), "accepted": accepted}
        rate = statistics.median(one.tokens_per_s for one in found)
        rows.append(Row(name=f"{method}/{text}/{batch}", value=rate, unit="tokens/s", detail=detail))
    return rows


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=count, nargs="+", default=[1, 32])
    parser.add_argument("--texts", choices=TEXTS, nargs="+")
    parser.add_argument("--sides", choices=SIDES, nargs="+", default=list(USUAL_SIDES))
    parser.add_argument("--quoting", action="store_true", help="use a model whose answers quote their prompts")
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--max-tokens", type=count, default=192)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=count, default=torch.get_num_threads())
    add_json_option(parser)
    args = parser.parse_args()
    texts = args.texts or (QUOTING_TEXTS if args.quoting else [text for text in TEXTS if text != "quoting"])
    with tempfile.TemporaryDirectory() as directory:
        model, draft_model = Path(directory) / "model", Path(directory) / "draft"
        write = write_quoting_llama if args.quoting else write_worded_llama
        write(model, torch.float32 if args.dtype == "float32" else torch.bfloat16)
        if "draft_model" in args.sides:
            write_draft_model(model, draft_model)
        engines = {side: Engine(model, draft_model, side, args) for side in SIDES if side in args.sides}
        gc.collect()
        rows = [row for batch in args.batches for text in texts for row in measure(engines, text, batch, args)]
    publish(
        rows, packages=("torch", "numpy"), json_file=args.json, title=f"draft tokens: random Llama, 125 M, {args.dtype}"
    )


if __name__ == "__main__":
    main()
