"""Deploying to a Ray that was there before, and stays."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest

from tests.support.cluster import ClusterProcess, assert_left_nothing, free_port, run_baton
from tests.support.shared_ray import SharedRayProcess, run_on, shared_ray


@pytest.mark.timeout(400)
def test_cluster_comes_to_an_existing_ray_and_leaves_it_running(served_model: Path) -> None:
    with shared_ray() as ray:
        only_token = {name: value for name, value in ray.environment.items() if name != "RAY_AUTH_MODE"}
        cluster = ClusterProcess({"model": str(served_model), "address": ray.address}, environment=only_token)
        try:
            cluster.wait_until_ready()
            assert any("Serve" in name for name in ray.children())
            assert_second_cluster_is_refused(cluster, ray)
            processes = cluster.processes()

            assert cluster.stop() == 0, cluster.log

            assert_left_nothing(cluster, processes)
            assert ray.process.is_running()
            ray.wait_until_serve_is_gone()
        finally:
            cluster.close()


def assert_second_cluster_is_refused(cluster: ClusterProcess, ray: SharedRayProcess) -> None:
    """Another command on the same Ray ends with one line, whatever its port, and the first cluster goes on."""
    for port in (cluster.port, free_port()):
        second = ClusterProcess({"address": ray.address, "port": port}, environment=ray.environment)
        try:
            assert second.wait_for_exit() == 2, second.log
            errors = [line for line in second.log.splitlines() if line.startswith("baton: error: ")]
            assert len(errors) == 1, second.log
            assert all(part in errors[0] for part in (ray.address, f":{cluster.port}", "already runs", "stop"))
        finally:
            second.close()
    answer = httpx.post(
        f"{cluster.url}/v1/completions", json={"prompt": "Once", "max_tokens": 4}, timeout=60, trust_env=False
    )
    assert answer.status_code == httpx.codes.OK, answer.text


@pytest.mark.timeout(400)
def test_serve_that_others_use_by_then_stays(served_model: Path) -> None:
    with shared_ray() as ray:
        cluster = ClusterProcess({"model": str(served_model), "address": ray.address}, environment=ray.environment)
        try:
            cluster.wait_until_ready()
            theirs = "serve.deployment(lambda request: 'theirs').bind()"
            run_on(ray, f"serve.run({theirs}, name='theirs', route_prefix='/x')")

            assert cluster.stop() == 0, cluster.log

            assert httpx.get(f"{cluster.url}/x", timeout=60, trust_env=False).text == "theirs"
            assert run_on(ray, "print(*serve.status().applications)") == "theirs"
        finally:
            cluster.close()


def test_address_where_no_ray_answers_is_refused_at_once(served_model: Path) -> None:
    result = run_baton("serve", "--model", str(served_model), "--address", "127.0.0.1:1")

    assert result.returncode == 2
    assert "no Ray answers at 127.0.0.1:1" in result.stderr


def test_missing_token_is_explained_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = f"127.0.0.1:{listening.getsockname()[1]}"

        cluster = ClusterProcess({"address": address}, environment={"RAY_AUTH_MODE": "token", "HOME": str(tmp_path)})
        try:
            assert cluster.wait_for_exit() == 2, cluster.log
            errors = [line for line in cluster.log.splitlines() if line.startswith("baton: error: ")]
            assert len(errors) == 1, cluster.log
            assert all(part in errors[0] for part in (address, "RAY_AUTH_MODE", str(tmp_path / ".ray/auth_token")))
            assert "Traceback" not in cluster.log
        finally:
            cluster.close()
