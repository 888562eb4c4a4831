"""Real clusters that several tests share; each is started once a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import ClusterProcess, running_cluster
from tests.support.served_checkpoint import make_served_checkpoint


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model."""
    return make_served_checkpoint(tmp_path_factory.mktemp("models") / "random-llama")


@pytest.fixture(scope="session")
def cluster(served_model: Path) -> Iterator[ClusterProcess]:
    """One prefill worker, one decode worker, one router."""
    with running_cluster(model=str(served_model), dtype="float32") as running:
        yield running


@pytest.fixture(scope="session")
def wide_cluster(served_model: Path) -> Iterator[ClusterProcess]:
    """Two workers of each kind."""
    with running_cluster(model=str(served_model), dtype="float32", prefill_replicas=2, decode_replicas=2) as running:
        yield running
