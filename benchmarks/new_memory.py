"""What reads of KV take while a cluster's memory is new, beside what they take once all of it was used before.

    python -m benchmarks.new_memory --json benchmarks/results/new_memory.json

A prefill and a decode worker with a thread each and a small KV cache serve one long prompt after the other. The first
prompts fill the cache, all later ones use blocks again. ``read/new`` and ``read/used`` are the median times of the
hand-overs' reads, from the waterfalls of the requests, and ``new_over_used`` is their ratio: 1 where workers do not
wait for memory.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import httpx
import torch
import yaml

from benchmarks.random_llama import write_random_llama
from benchmarks.report import Row, add_json_option, publish
from benchmarks.served import served_cluster
from benchmarks.whatif_parts.cases import APART
from benchmarks.whatif_parts.real import SETTINGS

BLOCK_SIZE = 16
PROMPT_TOKENS = 45 * BLOCK_SIZE
NUM_PROMPTS = 10
"""As many prompts fill the cache. The first one meets the other worker, and does not count."""

TIMEOUT_S = 120.0


def read_s(client: httpx.Client, model: str, number: int) -> float:
    """Serve a prompt that no other resembles; how long its hand-over's read took."""
    prompt = [(7919 * number + 31 * place) % 30_000 + 5 for place in range(PROMPT_TOKENS)]
    body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    client.post("/v1/completions", json=body).raise_for_status()
    (request,) = client.get("/v1/requests", params={"limit": 1}).json()["data"]
    spans = client.get(f"/v1/requests/{request['id']}/trace").json()["spans"]
    return sum(span["duration_ms"] for span in spans if span["name"] == "kv_transfer") / 1e3


def main() -> None:
    """Measure, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        write_random_llama(Path(directory), torch.bfloat16)
        file = Path(directory) / "baton.yaml"
        num_blocks = (NUM_PROMPTS + 1) * PROMPT_TOKENS // BLOCK_SIZE
        settings = {"model": directory, "max_model_len": 2048, "cache": {"num_blocks": num_blocks}, **SETTINGS[APART]}
        file.write_text(yaml.safe_dump(settings))
        with (
            served_cluster(["--config", str(file)]) as url,
            httpx.Client(base_url=url, timeout=TIMEOUT_S) as client,
        ):
            model = client.get("/v1/models").json()["data"][0]["id"]
            seconds = [read_s(client, model, number) for number in range(3 * NUM_PROMPTS)]
    new, used = (statistics.median(part) for part in (seconds[1:NUM_PROMPTS], seconds[2 * NUM_PROMPTS :]))
    rows = [
        Row(name="read/new", value=1e3 * new, unit="ms"),
        Row(name="read/used", value=1e3 * used, unit="ms"),
        Row(name="new_over_used", value=new / used, unit="x"),
    ]
    publish(rows, packages=("nixl", "torch"), json_file=args.json, title=f"reads of {PROMPT_TOKENS} tokens")


if __name__ == "__main__":
    main()
