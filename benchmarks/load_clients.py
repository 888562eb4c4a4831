"""Public load clients, unchanged, against a cluster with the built-in model.

`python -m benchmarks.load_clients --json FILE` installs `evalscope` and `aiperf`, each in an environment of its own
(their pins are not ours), starts a cluster, and lets both send streamed chats with ``ignore_eos``, ``min_tokens`` and
usage. It fails unless every request of both succeeded with exactly the tokens asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.arguments import count
from benchmarks.report import Row, add_json_option, publish
from benchmarks.served import served_cluster
from engine.model.builtin import builtin_model_dir

ENVIRONMENTS = Path(__file__).resolve().parent.parent / ".cache" / "load-clients"
INSTALL_TIMEOUT_S = 1800
RUN_TIMEOUT_S = 600
OUR_VARIABLES = ("PYTHONPATH", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "OMP_NUM_THREADS")
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")


class ClientError(Exception):
    """A client could not be run, or reported errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load that each client is told to send."""

    num_requests: int
    concurrency: int
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The results that a client reports."""

    num_good: int
    num_failed: int
    num_output_tokens: float
    ttft_ms: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """One public client: its package, its command for a load, and where it writes its results."""

    name: str
    requirement: str
    arguments: Callable[[str, str, Load, Path], Sequence[str]]
    read: Callable[[Path], Figures]

    @property
    def folder(self) -> Path:
        """The folder of its environment."""
        return ENVIRONMENTS / self.name

    def install(self) -> str:
        """Create the environment if it is missing; returns the version."""
        python = self.folder / "bin" / "python"
        stamp = self.folder / ".installed"
        if not stamp.exists() or stamp.read_text() != self.requirement:
            print(f"installing {self.requirement}", flush=True)
            venv.create(self.folder, with_pip=True, clear=True)
            subprocess.run([str(python), *PIP, self.requirement], check=True, timeout=INSTALL_TIMEOUT_S)
            stamp.write_text(self.requirement)
        code = f"import importlib.metadata; print(importlib.metadata.version({self.name!r}))"
        found = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True, timeout=60)
        return found.stdout.strip()

    def run(self, url: str, model: str, load: Load) -> Figures:
        """Send the load, and read the client's results.

        Raises:
            ClientError: It ended with an error, or left no figures.
        """
        with tempfile.TemporaryDirectory() as folder:
            command = [str(self.folder / "bin" / self.name), *self.arguments(url, model, load, Path(folder))]
            try:
                result = subprocess.run(
                    command,
                    cwd=folder,
                    env=client_environment(),
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=RUN_TIMEOUT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                raise ClientError(f"{self.name} did not end within {RUN_TIMEOUT_S} s") from error
            said = (result.stdout + result.stderr)[-4000:]
            if result.returncode != 0:
                raise ClientError(f"{self.name} ended with {result.returncode}:\n{said}")
            try:
                return self.read(Path(folder))
            except (KeyError, ValueError, TypeError) as error:
                raise ClientError(f"{self.name} left no figures: {error!r}\n{said}") from error


def client_environment() -> dict[str, str]:
    """Our environment variables without our modules, and with a model hub that refuses connections: all files that the
    clients need are in the model's directory.

    Not by the hub's offline mode: aiperf then looks for a local directory on the hub.
    """
    kept = {name: value for name, value in os.environ.items() if name not in OUR_VARIABLES}
    return {**kept, "HF_ENDPOINT": "http://127.0.0.1:9", "COLUMNS": "120"}


def evalscope_arguments(url: str, model: str, load: Load, folder: Path) -> Sequence[str]:
    """Arguments for a closed loop of random prompts."""
    return (
        *("perf", "--url", f"{url}/v1/chat/completions", "--api", "openai", "--model", model, "--stream"),
        *("--dataset", "random", "--tokenizer-path", str(builtin_model_dir()), "--seed", "7"),
        *("--min-prompt-length", str(load.num_prompt_tokens), "--max-prompt-length", str(load.num_prompt_tokens)),
        *("--min-tokens", str(load.num_output_tokens), "--max-tokens", str(load.num_output_tokens)),
        *("--extra-args", json.dumps({"ignore_eos": True})),
        *("--parallel", str(load.concurrency), "--number", str(load.num_requests)),
        *("--outputs-dir", str(folder), "--no-timestamp"),
    )


def read_evalscope(folder: Path) -> Figures:
    """Read its summary."""
    summary = only_json(folder, "benchmark_summary.json")
    return Figures(
        num_good=int(summary["Success Requests"]),
        num_failed=int(summary["Failed Requests"]),
        num_output_tokens=float(summary["Avg Output Tokens"]),
        ttft_ms=float(summary["Avg TTFT (ms)"]),
        tokens_per_s=float(summary["Output Throughput (tok/s)"]),
    )


def aiperf_arguments(url: str, model: str, load: Load, folder: Path) -> Sequence[str]:
    """Arguments for a closed loop of random prompts; token counts come from the usage that the server streams."""
    return (
        *("profile", "--url", url, "--endpoint-type", "chat", "--model", model, "--streaming"),
        *("--tokenizer", str(builtin_model_dir()), "--random-seed", "7", "--use-server-token-count"),
        *("--synthetic-input-tokens-mean", str(load.num_prompt_tokens), "--synthetic-input-tokens-stddev", "0"),
        *("--output-tokens-mean", str(load.num_output_tokens), "--output-tokens-stddev", "0"),
        *("--extra-inputs", f"min_tokens:{load.num_output_tokens}", "--extra-inputs", "ignore_eos:true"),
        *("--concurrency", str(load.concurrency), "--request-count", str(load.num_requests)),
        *("--artifact-dir", str(folder / "artifacts"), "--ui-type", "none"),
    )


def read_aiperf(folder: Path) -> Figures:
    """Read its summary."""
    summary = only_json(folder, "profile_export_aiperf.json")
    errors = summary.get("error_request_count") or {}
    return Figures(
        num_good=int(summary["request_count"]["avg"]),
        num_failed=int(errors.get("avg") or len(summary.get("error_summary") or ())),
        num_output_tokens=float(summary["output_sequence_length"]["avg"]),
        ttft_ms=float(summary["time_to_first_token"]["avg"]),
        tokens_per_s=float(summary["output_token_throughput"]["avg"]),
    )


def only_json(folder: Path, name: str) -> dict[str, Any]:
    """The only file with that name somewhere in a folder.

    Raises:
        ValueError: There is none, or more than one.
    """
    found = list(folder.rglob(name))
    if len(found) != 1:
        raise ValueError(f"{len(found)} files {name}")
    content: dict[str, Any] = json.loads(found[0].read_text())
    return content


CLIENTS = (
    Client(
        name="evalscope",
        requirement="evalscope[perf]==1.14.1",
        arguments=evalscope_arguments,
        read=read_evalscope,
    ),
    Client(name="aiperf", requirement="aiperf==0.13.0", arguments=aiperf_arguments, read=read_aiperf),
)


def check(client: Client, figures: Figures, load: Load) -> None:
    """Check that every request succeeded, with the tokens that were asked for.

    Raises:
        ClientError: Not so.
    """
    if figures.num_failed or figures.num_good != load.num_requests:
        raise ClientError(f"{client.name}: {figures.num_good} of {load.num_requests} succeeded: {figures}")
    if figures.num_output_tokens != load.num_output_tokens:
        raise ClientError(f"{client.name}: {figures.num_output_tokens} tokens an answer, not {load.num_output_tokens}")


def rows_of(client: Client, version: str, figures: Figures) -> list[Row]:
    """The rows for the results."""
    detail: dict[str, float | str] = {"version": version, "failed": float(figures.num_failed)}
    return [
        Row(name=f"{client.name} requests", value=figures.num_good, unit="requests", detail=detail),
        Row(name=f"{client.name} throughput", value=figures.tokens_per_s, unit="tokens/s", detail=detail),
        Row(name=f"{client.name} mean TTFT", value=figures.ttft_ms, unit="ms", detail=detail),
    ]


def run_clients(url: str, versions: dict[str, str], load: Load, clients: Sequence[Client]) -> list[Row]:
    """Run one client after the other. Between them no request may be left, and none may have failed.

    Raises:
        ClientError: A client or the cluster complains.
    """
    model = httpx.get(f"{url}/v1/models", timeout=30, trust_env=False).json()["data"][0]["id"]
    rows: list[Row] = []
    for client in clients:
        figures = client.run(url, model, load)
        check(client, figures, load)
        totals = httpx.get(f"{url}/status", timeout=30, trust_env=False).json()["totals"]
        if totals["failed"]:
            raise ClientError(f"{client.name}: the cluster failed on {totals['failed']} requests")
        rows += rows_of(client, versions[client.name], figures)
        print(f"{client.name}: {figures}", flush=True)
    return rows


def main() -> int:
    """Install, run, publish; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=count, default=64)
    parser.add_argument("--concurrency", type=count, default=8)
    parser.add_argument("--prompt-tokens", type=count, default=128)
    parser.add_argument("--output-tokens", type=count, default=48)
    parser.add_argument("--url", help="URL of a running cluster; default: start one")
    add_json_option(parser)
    options = parser.parse_args()
    load = Load(
        num_requests=options.requests,
        concurrency=options.concurrency,
        num_prompt_tokens=options.prompt_tokens,
        num_output_tokens=options.output_tokens,
    )
    try:
        versions = {client.name: client.install() for client in CLIENTS}
        if options.url:
            rows = run_clients(options.url, versions, load, CLIENTS)
        else:
            with served_cluster([]) as url:
                rows = run_clients(url, versions, load, CLIENTS)
    except ClientError as error:
        print(error, file=sys.stderr)
        return 1
    publish(rows, packages=("ray", "torch", "nixl"), json_file=options.json, title="Public load clients, unchanged")
    return 0


if __name__ == "__main__":
    sys.exit(main())
