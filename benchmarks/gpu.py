"""How much of a GPU's potential Baton uses, in one run of a few minutes: decode, prefill, and KV between two engines.

    python -m benchmarks.gpu --json benchmarks/results/gpu.json

A random Llama of 8 B parameters in bfloat16 (``--shape``), written first. Rows:

``ceiling/memory`` and ``ceiling/matmul``: measured in this run. ``attention/<rows>x<tokens>/<kernel>``: one layer's
decode rows, in us. ``decode/<batch>`` in tokens/s after prompts of 128
tokens; ``decode_share/<batch>``: the bytes that its steps must read, of what the memory could give in that time.
``eager/<batch>``: the same without graphs. ``prefill/<tokens>`` in tokens/s, one prompt, one step;
``prefill_share/<tokens>``: its operations, of what the matrix units could do in that time. ``hand_over/<tokens>`` in
ms: prefilled by an engine in another process on the same GPU, from the request's arrival at decode to its next token;
``hand_over_equal``: share of those requests whose tokens are those of one engine alone.

A part that fails is named at the end, and what the others found is written all the same; the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.arguments import count
from benchmarks.gpu_parts.ceilings import matmul_flops_per_s, memory_bytes_per_s
from benchmarks.gpu_parts.decode_kernels import decode_kernel_rows
from benchmarks.gpu_parts.engine import MAX_BATCH, EngineBench, Settings
from benchmarks.gpu_parts.hand_over import HandOver, Meeting, hand_over, nixl_builder, prefilling
from benchmarks.gpu_parts.shape import SHAPES, LlamaShape, llama_directory
from benchmarks.report import Row, add_json_option, publish

DECODE_PROMPT_TOKENS = 128
NUM_REPEATS = 3
PARTS = ("attention", "decode", "prefill", "hand_over")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The device's limits, per second."""

    memory_bytes: float
    matmul_flops: float

    @classmethod
    def measure(cls, device: torch.device, *, num_bytes: int, size: int) -> Ceilings:
        """Measure the limits, and free the device memory that this took."""
        ceilings = cls(
            memory_bytes=memory_bytes_per_s(device, num_bytes), matmul_flops=matmul_flops_per_s(device, size)
        )
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return ceilings

    def rows(self, device_name: str) -> list[Row]:
        """The rows of the limits, with stable names."""
        detail: dict[str, float | str] = {"device": device_name, "cuda": str(torch.version.cuda)}
        return [
            Row(name="ceiling/memory", value=self.memory_bytes / 1e9, unit="GB/s", detail=detail),
            Row(name="ceiling/matmul", value=self.matmul_flops / 1e12, unit="TFLOP/s", detail=detail),
        ]


def decode_rows(shape: LlamaShape, ceilings: Ceilings, *, batch: int, step_s: float, context: float) -> list[Row]:
    """The rows of a decode rate, and of its ratio to the limit of memory bandwidth."""
    share = shape.step_bytes(batch=batch, context=context) / step_s / ceilings.memory_bytes
    return [
        Row(name=f"decode/{batch}", value=batch / step_s, unit="tokens/s", detail={"step_ms": 1e3 * step_s}),
        Row(name=f"decode_share/{batch}", value=share, unit="of memory"),
    ]


def prefill_rows(shape: LlamaShape, ceilings: Ceilings, *, num_tokens: int, seconds: float) -> list[Row]:
    """The rows of a prefill rate, and of its ratio to the limit of matrix products."""
    share = shape.prefill_flops(num_tokens) / seconds / ceilings.matmul_flops
    return [
        Row(
            name=f"prefill/{num_tokens}", value=num_tokens / seconds, unit="tokens/s", detail={"ttft_ms": 1e3 * seconds}
        ),
        Row(name=f"prefill_share/{num_tokens}", value=share, unit="of matmul"),
    ]


def hand_over_row(num_tokens: int, found: HandOver) -> Row:
    """The row of a hand-over: its duration, and the transfer rate."""
    return Row(
        name=f"hand_over/{num_tokens}",
        value=1e3 * found.seconds,
        unit="ms",
        detail={"MB": found.num_bytes / 1e6, "GB_per_s": found.num_bytes / found.seconds / 1e9},
    )


class Run:
    """Measures one engine, then a second one next to it. If a part fails, the others still run."""

    def __init__(self, args: argparse.Namespace, settings: Settings) -> None:
        self._args = args
        self._settings = settings
        self._shape = settings.shape
        self.rows: list[Row] = []
        self.failures: list[str] = []

    def measure(self) -> None:
        """Run all parts."""
        device = torch.device(self._settings.device)
        is_gpu = device.type == "cuda"
        sizes = {"num_bytes": 4 << 30, "size": 8192} if is_gpu else {"num_bytes": 1 << 24, "size": 128}
        ceilings = Ceilings.measure(device, **sizes)
        self.rows += ceilings.rows(torch.cuda.get_device_name(device) if is_gpu else "cpu")
        meeting = Meeting()
        bench = EngineBench(
            self._settings, nixl_builder("decode", meeting) if "hand_over" in self._args.parts else None
        )
        try:
            self.rows.append(self._start_row(bench))
            parts: dict[str, Callable[[], Iterator[Row]]] = {
                "attention": lambda: self._attention(ceilings),
                "decode": lambda: self._decode(bench, ceilings),
                "prefill": lambda: self._prefill(bench, ceilings),
                "hand_over": lambda: self._hand_over(bench, meeting),
            }
            for name in self._args.parts:
                self._try(name, parts[name])
        finally:
            bench.close()

    def _try(self, name: str, part: Callable[[], Iterator[Row]]) -> None:
        try:
            for row in part():
                self.rows.append(row)
                print(f"  {row.name}: {row.value:.4g} {row.unit}", flush=True)
        except Exception:
            self.failures.append(name)
            traceback.print_exc()

    def _start_row(self, bench: EngineBench) -> Row:
        runner = bench.runner
        return Row(
            name="start",
            value=bench.start_s,
            unit="s",
            detail={
                "block_size": str(runner.layout.block_size),
                "num_blocks": str(runner.num_blocks),
                "graph_sizes": " ".join(map(str, runner.graph_sizes)) or "none",
                "attention": str(getattr(runner._attention, "kernels", "cpu")),
            },
        )

    def _attention(self, ceilings: Ceilings) -> Iterator[Row]:
        return decode_kernel_rows(self._shape, self._settings.block_size, ceilings.memory_bytes)

    def _decode(self, bench: EngineBench, ceilings: Ceilings) -> Iterator[Row]:
        num_steps = self._args.steps

        def step_s(batch: int) -> float:
            return bench.decode_step_s(batch, num_prompt_tokens=DECODE_PROMPT_TOKENS, num_steps=num_steps)

        for batch in self._args.batches:
            seconds = min(step_s(batch) for _ in range(NUM_REPEATS))
            context = DECODE_PROMPT_TOKENS + num_steps / 2
            yield from decode_rows(self._shape, ceilings, batch=batch, step_s=seconds, context=context)
        with bench.without_graphs():
            for batch in self._args.batches:
                seconds = min(step_s(batch) for _ in range(NUM_REPEATS))
                yield Row(
                    name=f"eager/{batch}", value=batch / seconds, unit="tokens/s", detail={"step_ms": 1e3 * seconds}
                )

    def _prefill(self, bench: EngineBench, ceilings: Ceilings) -> Iterator[Row]:
        for num_tokens in self._args.prompts:
            seconds = min(bench.prefill_s(num_tokens) for _ in range(NUM_REPEATS + 1))
            yield from prefill_rows(self._shape, ceilings, num_tokens=num_tokens, seconds=seconds)

    def _hand_over(self, bench: EngineBench, meeting: Meeting) -> Iterator[Row]:
        num_equal, num_requests = 0, 0
        with prefilling(self._settings, meeting) as process:
            for num_tokens in self._args.prompts:
                found = []
                for _ in range(NUM_REPEATS):  # the first one meets the peer
                    request = bench.request(num_tokens, max_tokens=17)
                    found.append(hand_over(process, bench, request))
                    num_equal += found[-1].token_ids == bench.generate(request)
                    num_requests += 1
                yield hand_over_row(num_tokens, min(found, key=lambda one: one.seconds))
        yield Row(name="hand_over_equal", value=num_equal / num_requests, unit="of requests")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8B")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only to try out this script")
    parser.add_argument("--block-size", type=count, default=16)
    parser.add_argument("--batches", nargs="+", type=count, default=[1, 8, 32, MAX_BATCH])
    parser.add_argument(
        "--prompts", nargs="+", type=count, default=[512, 2048, 8192], help="lengths of the prompts in tokens"
    )
    parser.add_argument("--steps", type=count, default=128, help="steps for each decode row")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        help="parts to measure, in this order",
    )
    parser.add_argument("--model", type=Path, help="directory to write the model to (16 GB) and reuse in later runs")
    add_json_option(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Parse, measure, print. Returns 1 if a part failed."""
    args = parse(arguments)
    shape = SHAPES[args.shape]
    with llama_directory(shape, torch.device(args.device), kept=args.model) as directory:
        settings = Settings(directory=directory, shape=shape, device=args.device, block_size=args.block_size)
        run = Run(args, settings)
        try:
            run.measure()
        except Exception:
            run.failures.append("start")
            traceback.print_exc()
    installed = {distribution.name for distribution in importlib.metadata.distributions()}
    packages = [name for name in ("torch", "triton", "nixl", "numpy") if name in installed]
    publish(run.rows, packages=packages, json_file=args.json, title=f"one GPU: random Llama, {args.shape}")
    if run.failures:
        print(f"these parts failed: {', '.join(run.failures)}", file=sys.stderr)
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
