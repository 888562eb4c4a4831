"""Real clusters that several tests share; each is started once, and gone when the tests of this folder are done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cluster import ClusterProcess, running_cluster
from tests.support.oracle_cases import OracleCase


@pytest.fixture(scope="session")
def served_model(oracle_case: Callable[[str], OracleCase]) -> Path:
    """A small random model, for whose prompts we know what transformers says."""
    return oracle_case("llama").path


@pytest.fixture(scope="package")
def cluster(served_model: Path) -> Iterator[ClusterProcess]:
    """One prefill worker, one decode worker, one router."""
    with running_cluster(model=str(served_model), dtype="float32") as running:
        yield running


@pytest.fixture(scope="package")
def wide_cluster(served_model: Path) -> Iterator[ClusterProcess]:
    """Two workers of each kind."""
    with running_cluster(model=str(served_model), dtype="float32", prefill_replicas=2, decode_replicas=2) as running:
        yield running
