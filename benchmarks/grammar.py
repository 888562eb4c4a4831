"""What grammars cost: masks in a decode step, compiling a schema, and a slow grammar while other requests run.

    python -m benchmarks.grammar --json benchmarks/results/grammar.json

One engine decodes ``batch`` streams of the 125 M random Llama (vocabulary 32,000) under a JSON schema, and as many
without: in turn, so many steps each, several rounds. Rows: ``step/plain/<batch>``, ``step/grammar/<batch>`` in us
(medians over steps), ``masks_share/<batch>`` in percent of a plain step; ``compile/1KB`` in ms, the median over
different schemas of about 1 KB, each new to the store, from asking to having it; ``slow_grammar/compile`` in ms, and
``slow_grammar/step_before``, ``slow_grammar/step_during`` and ``slow_grammar/step_after`` in us: the median step of the
other streams before, while and after a grammar of thousands of patterns compiles, with ``longest_us``; their contexts
grow meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import count
from benchmarks.random_llama import VOCAB_SIZE, name_all_tokens, write_random_llama
from benchmarks.report import Row, add_json_option, publish
from engine.build import build_engine
from engine.contract.config import CacheConfig, EngineConfig, ModelConfigSource, SchedulerConfig
from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.token_ids import TokenIds
from engine.frontend.engine_core import EngineCore
from engine.sampling.grammar.compiler import GrammarStore
from router.grammar.grammar_text import json_schema_grammar

END = 2
PROMPT_TOKENS = 128
NUM_ROUNDS = 3
NUM_SCHEMAS = 60
NUM_SLOW_PATTERNS = 9000

TEXT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["title", "tags"],
    "additionalProperties": False,
}


class Streams:
    """An engine and its requests."""

    def __init__(self, directory: Path, *, num_threads: int, max_num_seqs: int) -> None:
        config = EngineConfig(
            model=ModelConfigSource(path=directory, device="cpu", dtype="float32", num_threads=num_threads),
            cache=CacheConfig(kv_cache_bytes=1 << 30, prefault=True),
            scheduler=SchedulerConfig(max_model_len=1024, max_num_batched_tokens=2048, max_num_seqs=max_num_seqs),
        )
        self.core: EngineCore = build_engine(config).core
        self._generator = torch.Generator().manual_seed(0)
        self._num_requests = 0

    def add(self, grammar: str | None, *, max_tokens: int) -> str:
        """Add a request; returns its id."""
        self._num_requests += 1
        prompt = torch.randint(3, VOCAB_SIZE, (PROMPT_TOKENS,), generator=self._generator).tolist()
        sampling = SamplingParams(
            max_tokens=max_tokens, eos_token_ids=(END,), ignore_eos=True, min_tokens=max_tokens, grammar=grammar
        )
        self.core.add_request(
            GenerateRequest(request_id=str(self._num_requests), prompt_token_ids=TokenIds.of(prompt), sampling=sampling)
        )
        return str(self._num_requests)

    def start(self, grammar: str | None, *, batch: int, max_tokens: int) -> None:
        """Start ``batch`` streams, up to the first token of each."""
        waiting = {self.add(grammar, max_tokens=max_tokens) for _ in range(batch)}
        while waiting:
            self.core.wake.clear()
            if not self.core.has_work():
                self.core.wake.wait(1.0)
            waiting -= {delta.request_id for delta in self.core.step().deltas()}

    def step_s(self) -> float:
        """The duration of a step."""
        started = time.perf_counter()
        self.core.step()
        return time.perf_counter() - started

    def finish(self) -> None:
        """Step until all requests have ended."""
        while self.core.has_unfinished():
            self.core.step()


def measure_masks(streams: Streams, batch: int, num_steps: int) -> list[Row]:
    """Compare steps with a grammar with steps without."""
    grammars = {"plain": None, "grammar": json_schema_grammar(TEXT_SCHEMA).text}
    steps: dict[str, list[float]] = {name: [] for name in grammars}
    for _ in range(NUM_ROUNDS):
        for name, grammar in grammars.items():
            streams.start(grammar, batch=batch, max_tokens=num_steps + 4)
            steps[name] += [streams.step_s() for _ in range(num_steps)]
            streams.finish()
    medians = {name: 1e6 * statistics.median(values) for name, values in steps.items()}
    share = 100 * (medians["grammar"] - medians["plain"]) / medians["plain"]
    rows = [Row(name=f"step/{name}/{batch}", value=value, unit="us") for name, value in medians.items()]
    return [*rows, Row(name=f"masks_share/{batch}", value=share, unit="percent")]


def schema_of_1_kb(number: int) -> dict[str, Any]:
    """A schema that differs for each number."""
    properties = {
        f"field_{number}_{index}": {"type": "string", "maxLength": 40}
        if index % 3
        else {"type": "array", "items": {"enum": [f"value {index}", "other"]}, "maxItems": 9}
        for index in range(15)
    }
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def measure_compile(directory: Path) -> list[Row]:
    """Compile schemas of 1 KB one after the other."""
    store = GrammarStore(directory, vocab_size=VOCAB_SIZE, eos_token_ids=(END,))
    ended = threading.Event()
    store.on_end = ended.set
    took: list[float] = []
    sizes: list[int] = []
    for number in range(NUM_SCHEMAS + 1):
        schema = schema_of_1_kb(number)
        sizes.append(len(json.dumps(schema)))
        took.append(_compile_s(store, json_schema_grammar(schema).text, ended))
    store.close()
    detail: dict[str, float | str] = {
        "p95": 1e3 * sorted(took[1:])[int(0.95 * NUM_SCHEMAS)],
        "first_with_tokenizer": 1e3 * took[0],
        "schema_bytes": statistics.median(sizes),
    }
    return [Row(name="compile/1KB", value=1e3 * statistics.median(took[1:]), unit="ms", detail=detail)]


def _compile_s(store: GrammarStore, grammar: str, ended: threading.Event) -> float:
    started = time.perf_counter()
    while store.poll(grammar) is None:
        ended.wait()
        ended.clear()
    return time.perf_counter() - started


def slow_grammar() -> str:
    """A grammar that takes much longer to compile than a step."""
    names = [f"k{number}" for number in range(NUM_SLOW_PATTERNS)]
    patterns = {
        name: {"type": "string", "pattern": f"^[a-z]{{1,{number % 50 + 1}}}$"} for number, name in enumerate(names)
    }
    return json_schema_grammar({"type": "object", "properties": patterns, "required": names}).text


def measure_slow(streams: Streams, batch: int) -> list[Row]:
    """Measure steps of plain streams before, while and after a slow grammar compiles."""
    streams.start(None, batch=batch, max_tokens=800)
    before = [streams.step_s() for _ in range(40)]
    grammar = slow_grammar()
    started = time.perf_counter()
    slow = streams.add(grammar, max_tokens=1)
    during: list[float] = []
    while slow in streams.core.scheduler._live_requests.live and streams.core.scheduler._live_requests.compiling:
        during.append(streams.step_s())
    took = time.perf_counter() - started
    streams.core.abort([slow])
    after = [streams.step_s() for _ in range(40)]
    for number in range(1, streams._num_requests + 1):
        streams.core.abort([str(number)])
    streams.finish()
    return [
        Row(name="slow_grammar/compile", value=1e3 * took, unit="ms", detail={"bytes": len(grammar)}),
        _steps_row("slow_grammar/step_before", before),
        _steps_row("slow_grammar/step_during", during),
        _steps_row("slow_grammar/step_after", after),
    ]


def _steps_row(name: str, steps: Sequence[float]) -> Row:
    detail: dict[str, float | str] = {"longest_us": 1e6 * max(steps), "num_steps": len(steps)}
    return Row(name=name, value=1e6 * statistics.median(steps), unit="us", detail=detail)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=count, default=64)
    parser.add_argument("--steps", type=count, default=40)
    parser.add_argument("--threads", type=count, default=torch.get_num_threads())
    add_json_option(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        write_random_llama(path, torch.float32)
        name_all_tokens(path)
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
        rows = measure_compile(path)
        streams = Streams(path, num_threads=args.threads, max_num_seqs=args.batch)
        rows += measure_masks(streams, args.batch, args.steps)
        rows += measure_slow(streams, max(args.batch // 4, 1))
    publish(rows, packages=("torch", "numpy", "llguidance"), json_file=args.json, title="grammars: random Llama, 125 M")


if __name__ == "__main__":
    main()
