"""Deploying to a Ray that was there before, and stays."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.support.cluster import ClusterProcess, assert_left_nothing, run_baton
from tests.support.shared_ray import shared_ray


@pytest.mark.timeout(400)
def test_cluster_comes_to_an_existing_ray_and_leaves_it_running(served_model: Path) -> None:
    with shared_ray() as ray:
        cluster = ClusterProcess({"model": str(served_model), "address": ray.address}, environment=ray.environment)
        try:
            cluster.wait_until_ready()
            answer = httpx.post(
                f"{cluster.url}/v1/completions", json={"prompt": "Once", "max_tokens": 4}, timeout=60, trust_env=False
            )
            assert answer.status_code == httpx.codes.OK, answer.text
            assert any("Serve" in name for name in ray.children())
            processes = cluster.processes()

            assert cluster.stop() == 0, cluster.log

            assert_left_nothing(cluster, processes)
            assert ray.process.is_running()
            assert not [name for name in ray.children() if "Serve" in name or "Proxy" in name]
        finally:
            cluster.close()


def test_address_where_no_ray_answers_is_refused_at_once(served_model: Path) -> None:
    result = run_baton("serve", "--model", str(served_model), "--address", "127.0.0.1:1")

    assert result.returncode == 2
    assert "no Ray answers at 127.0.0.1:1" in result.stderr
