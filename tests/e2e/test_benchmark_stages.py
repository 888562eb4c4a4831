"""Clusters with other workers than Baton's own, which benchmarks start in a process of their own, serve and end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch
import yaml

from benchmarks.random_llama import write_small_llama
from benchmarks.router import stage
from benchmarks.scaling_parts.paced_worker import MACHINE_VARIABLE
from benchmarks.scaling_parts.real import settings
from benchmarks.served import served_stage
from engine.contract.promise import Promise
from router.scaling_rules import PoolBounds, ScalingRules
from simulation.machine import CPU_CORE
from tests.support.cluster.cluster import is_ready
from tests.support.waiting import wait_until

NUM_TOKENS = 3


def answer(url: str) -> dict[str, object]:
    body = {"prompt": [5, 6, 7], "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=120.0, trust_env=False)
    response.raise_for_status()
    usage: dict[str, object] = response.json()["usage"]
    return usage


@pytest.fixture
def paced_url(tmp_path: Path) -> Iterator[str]:
    write_small_llama(tmp_path, torch.float32)
    rules = ScalingRules(pools={"decode": PoolBounds(least=1, most=2)})
    promise = Promise(ttft_ms=3000.0, itl_ms=1000.0)
    config = settings(tmp_path, CPU_CORE, promise, num_workers=1, rules=rules)
    (tmp_path / "baton.yaml").write_text(yaml.safe_dump(config))
    environment = {MACHINE_VARIABLE: CPU_CORE.name}
    with served_stage("benchmarks.scaling_parts.stage", str(tmp_path / "baton.yaml"), environment=environment) as pid:
        url = f"http://127.0.0.1:{config['port']}"
        with httpx.Client(trust_env=False) as client:  # the stage serves; its router may not know the worker yet
            wait_until(lambda: is_ready(client, url))
        yield url
        processes = psutil.Process(pid).children(recursive=True)
    _, alive = psutil.wait_procs(processes, timeout=120.0)
    assert not alive


def test_paced_workers_serve_in_steps_of_their_machine(paced_url: str) -> None:
    assert answer(paced_url)["completion_tokens"] == NUM_TOKENS
    status = httpx.get(f"{paced_url}/status", timeout=120.0, trust_env=False).json()
    (worker,) = status["pools"]["decode"]
    counters = worker["counters"]
    # Its noise makes a step shorter now and then; one of the model itself takes a tenth of the time.
    assert counters["step_s"] >= 0.7 * counters["num_steps"] * CPU_CORE.step_time.base_s


def test_pretended_workers_serve() -> None:
    with stage("baton", "direct") as running:
        assert answer(running.url)["completion_tokens"] == NUM_TOKENS
