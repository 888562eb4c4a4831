"""Real clusters that several tests share; each is started once, and gone when the tests of this folder are done.

So every test here leaves them as it found them: at rest, with the workers that they began with or as good ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster.cluster import ClusterProcess, running_cluster
from tests.support.cluster.otlp_collector import Collector, running_collector

SAMPLE = Path(__file__).parents[3] / "deploy" / "baton.yaml"


@pytest.fixture(scope="package")
def cluster(served_model: Path) -> Iterator[ClusterProcess]:
    """One prefill worker, one decode worker, one router: the sample for a laptop, with our model."""
    with running_cluster(sample=SAMPLE, model=str(served_model), dtype="float32") as running:
        yield running


@pytest.fixture(scope="package")
def collector() -> Iterator[Collector]:
    """Gets the spans of ``wide_cluster``."""
    with running_collector() as running:
        yield running


@pytest.fixture(scope="package")
def wide_cluster(served_model: Path, collector: Collector) -> Iterator[ClusterProcess]:
    """Two workers of each role. Spans are only made for requests whose callers sampled them."""
    with running_cluster(
        model=str(served_model),
        dtype="float32",
        prefill_replicas=2,
        decode_replicas=2,
        tracing={"otlp_endpoint": collector.url, "sample_ratio": 0.0},
        environment={"OTEL_BSP_SCHEDULE_DELAY": "200"},
    ) as running:
        running.wait_until_pools_have(2)
        yield running
