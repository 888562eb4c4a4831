"""Commands that meet on a Ray that all of them may use: at the same moment, after one was killed, after one failed."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from cluster.deploy.readiness import wait_until_ready
from tests.support.cluster.cluster import POLL_PERIOD_S, ClusterProcess, run_baton
from tests.support.cluster.http_completions import assert_at_rest, complete_all, read_status, wait_for_rest
from tests.support.cluster.ports import free_port
from tests.support.cluster.shared_ray import SharedRayProcess, shared_ray

START_TIMEOUT_S = 240.0
UNTHINKABLE = 10**12
"""KV blocks that no machine has the address space for: a worker fails when it allocates them, and not before."""


@pytest.fixture(scope="module")
def ray() -> Iterator[SharedRayProcess]:
    with shared_ray() as running:
        yield running


def baton(ray: SharedRayProcess, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_baton(
        command, "--address", ray.address, *arguments, environment=ray.environment, timeout_s=START_TIMEOUT_S
    )


def shut_down(ray: SharedRayProcess) -> None:
    stopped = baton(ray, "shutdown")
    assert stopped.returncode == 0, stopped.stderr
    assert "stopped" in stopped.stderr
    ray.wait_until_serve_is_gone()


def kill(command: ClusterProcess) -> None:
    """End a command so that it cannot give anything back."""
    process = psutil.Process(command.pid)
    process.kill()
    assert command.wait_for_exit() != 0


def test_of_two_serve_commands_at_the_same_moment_one_serves(ray: SharedRayProcess, served_model: Path) -> None:
    """Then the one that serves is killed: its claim is free, and the next command names what it left."""
    config = {"model": str(served_model), "address": ray.address}
    both = [ClusterProcess(config, environment=ray.environment) for _ in range(2)]
    third: ClusterProcess | None = None
    try:
        loser = first_that_ended(both)
        (winner,) = [command for command in both if command is not loser]
        assert loser.wait_for_exit() == 2, loser.log
        errors = [line for line in loser.log.splitlines() if line.startswith("baton: error: ")]
        assert len(errors) == 1, loser.log
        assert all(part in errors[0] for part in (ray.address, f":{winner.port}", "already runs", str(winner.pid)))
        winner.wait_until_ready()

        kill(winner)
        third = ClusterProcess(config, environment=ray.environment)

        assert third.wait_for_exit() == 2, third.log
        assert "`baton shutdown --address" in third.log
        shut_down(ray)
    finally:
        for command in (*both, *([third] if third else [])):
            command.close()


def first_that_ended(commands: list[ClusterProcess]) -> ClusterProcess:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        for command in commands:
            if command.has_ended():
                return command
        time.sleep(POLL_PERIOD_S)
    raise AssertionError("\n".join(command.log for command in commands))


def write(folder: Path, config: dict[str, Any], **changes: Any) -> tuple[str, str]:
    file = folder / "baton.yaml"
    file.write_text(yaml.safe_dump({**config, **changes}))
    return "--config", str(file)


async def test_claim_of_a_killed_command_is_free_and_an_update_that_fails_is_taken_back(
    ray: SharedRayProcess, served_model: Path, tmp_path: Path
) -> None:
    """And a pool that follows its load keeps its size through all of it, whatever size new pools start with."""
    scaling = {"max_replicas": 2, "down_delay_s": 3600}
    config = {"model": str(served_model), "dtype": "float32", "port": free_port(), "decode": {"scaling": scaling}}
    url = f"http://127.0.0.1:{config['port']}"
    large = {**config, "decode_replicas": 2}
    first = ClusterProcess(large, command=("deploy", "--address", ray.address), environment=ray.environment)
    try:
        first.wait_for_output("] decode ")
        kill(first)
    finally:
        first.close()
    same = baton(ray, "deploy", *write(tmp_path, config))
    assert same.returncode == 0, same.stderr
    wait_until_ready(url, timeout_s=START_TIMEOUT_S)
    before = await complete_all(url, [[5] * 20], max_tokens=[8])
    workers = ids_of(url)

    broken = write(tmp_path, config, decode={"scaling": scaling, "cache": {"num_blocks": UNTHINKABLE}})
    update = asyncio.create_task(asyncio.to_thread(baton, ray, "deploy", *broken))
    answers = []
    while not update.done():
        answers += await complete_all(url, [[5] * 20], max_tokens=[8])
    failed = update.result()

    assert failed.returncode == 1, failed.stderr
    assert "the previous configuration runs again" in failed.stderr
    assert len(answers) > 1
    assert set(answers) == set(before), "nothing was noticed while it was tried"
    assert ids_of(url)["prefill"] == workers["prefill"], "what did not change goes on as it is"
    assert "the running one" in baton(ray, "deploy", *write(tmp_path, config)).stderr
    wait_for_decode_workers(url, 2)
    assert_at_rest(wait_for_rest(url))
    shut_down(ray)


def ids_of(url: str) -> dict[str, set[str]]:
    return {role: {row["replica_id"] for row in rows} for role, rows in read_status(url)["pools"].items()}


def wait_for_decode_workers(url: str, number: int) -> None:
    """Return when the router sees so many: it learns of them one after the other."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while len(found := ids_of(url)["decode"]) != number:
        assert time.monotonic() < deadline_s, found
        time.sleep(POLL_PERIOD_S)
