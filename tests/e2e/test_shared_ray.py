"""Deploying to a Ray that existed before and stays: each test leaves it as it was, for the next one."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from cluster.deploy.readiness import wait_until_ready
from tests.support.cluster.cluster import ClusterProcess, assert_left_nothing, run_baton
from tests.support.cluster.ports import free_port
from tests.support.cluster.shared_ray import SharedRayProcess, run_on, serve_run, shared_ray

DEPLOY = Path(__file__).parents[2] / "deploy"
START_TIMEOUT_S = 240.0


@pytest.fixture(scope="module")
def ray() -> Iterator[SharedRayProcess]:
    with shared_ray() as running:
        yield running


def test_cluster_comes_to_an_existing_ray_and_leaves_it_running(ray: SharedRayProcess, served_model: Path) -> None:
    only_token = {name: value for name, value in ray.environment.items() if name != "RAY_AUTH_MODE"}
    cluster = ClusterProcess({"model": str(served_model), "address": ray.address}, environment=only_token)
    try:
        cluster.wait_until_ready()
        assert any("Serve" in name for name in ray.children())
        assert_second_cluster_is_refused(cluster, ray)
        assert_deployment_over_it_is_refused(ray)
        processes = cluster.processes()

        assert cluster.stop() == 0, cluster.log

        assert_left_nothing(cluster, processes)
        assert ray.process.is_running()
        ray.wait_until_serve_is_gone()
    finally:
        cluster.close()


def assert_second_cluster_is_refused(cluster: ClusterProcess, ray: SharedRayProcess) -> None:
    """Another command on the same Ray ends with one line, whatever its port, and the first cluster continues."""
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


def assert_deployment_over_it_is_refused(ray: SharedRayProcess) -> None:
    """`baton deploy` leaves a cluster alone that its `baton serve` would take off."""
    sample = str(DEPLOY / "baton.yaml")

    result = run_baton(
        "deploy", "--config", sample, "--address", ray.address, environment=ray.environment, timeout_s=START_TIMEOUT_S
    )

    assert result.returncode == 2, result.stderr
    assert "already runs a Baton cluster" in result.stderr
    assert "of the `baton serve` that" in result.stderr


def test_sample_for_serve_deploy_starts_and_is_shut_down_like_any_other(ray: SharedRayProcess, tmp_path: Path) -> None:
    content = yaml.safe_load((DEPLOY / "serve-config.yaml").read_text())
    content["http_options"] = {"host": "127.0.0.1", "port": free_port()}
    file = tmp_path / "serve-config.yaml"
    file.write_text(yaml.safe_dump(content))
    url = f"http://127.0.0.1:{content['http_options']['port']}"

    serve_run(ray, file)
    wait_until_ready(url, timeout_s=START_TIMEOUT_S)
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "Once", "max_tokens": 4}, timeout=60, trust_env=False)
    assert answer.status_code == httpx.codes.OK, answer.text
    assert httpx.post(f"{url}/admin/drain", json={"replica": "x"}, timeout=60, trust_env=False).status_code == 403

    stopped = run_baton("shutdown", "--address", ray.address, environment=ray.environment, timeout_s=START_TIMEOUT_S)

    assert stopped.returncode == 0, stopped.stderr
    assert "stopped" in stopped.stderr
    ray.wait_until_serve_is_gone()


def test_deployment_that_nobody_waits_for_is_remembered(
    ray: SharedRayProcess, served_model: Path, tmp_path: Path
) -> None:
    def deploy(**changes: object) -> subprocess.CompletedProcess[str]:
        file = tmp_path / "baton.yaml"
        file.write_text(yaml.safe_dump({**config, **changes}))
        return run_baton(
            *("deploy", "--config", str(file), "--address", ray.address),
            environment=ray.environment,
            timeout_s=START_TIMEOUT_S,
        )

    config = {"model": str(served_model), "port": free_port()}
    first = ClusterProcess(config, command=("deploy", "--address", ray.address), environment=ray.environment)
    try:
        first.wait_for_output("starting workers and router")
        assert first.stop() != 0
        assert "Serve continues" in first.log
    finally:
        first.close()

    other = deploy(model=None)
    same = deploy()

    assert other.returncode == 2, other.stderr
    assert "breaking answers in progress (model" in other.stderr
    assert same.returncode == 0, same.stderr
    wait_until_ready(f"http://127.0.0.1:{config['port']}", timeout_s=START_TIMEOUT_S)
    stopped = run_baton("shutdown", "--address", ray.address, environment=ray.environment, timeout_s=START_TIMEOUT_S)
    assert stopped.returncode == 0, stopped.stderr
    ray.wait_until_serve_is_gone()


def test_serve_that_others_use_by_then_stays(ray: SharedRayProcess, served_model: Path) -> None:
    cluster = ClusterProcess({"model": str(served_model), "address": ray.address}, environment=ray.environment)
    try:
        cluster.wait_until_ready()
        theirs = "serve.deployment(lambda request: 'theirs').bind()"
        run_on(ray, f"serve.run({theirs}, name='theirs', route_prefix='/x')")

        assert cluster.stop() == 0, cluster.log

        assert httpx.get(f"{cluster.url}/x", timeout=60, trust_env=False).text == "theirs"
        assert run_on(ray, "print(*serve.status().applications)") == "theirs"
        run_on(ray, "serve.shutdown()")
        ray.wait_until_serve_is_gone()
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
