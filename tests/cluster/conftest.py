"""One cluster of test hosts for all tests of this folder, and the figures that they see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.report import Row, publish
from tests.cluster.host_cluster import HostCluster
from tests.cluster.hosts import Hosts
from tests.cluster.load import KnownAnswers
from tests.cluster.network import OPERATOR
from tests.cluster.redis import PASSWORD, PORT, running_redis
from tests.cluster.requirements import why_not
from tests.support.cluster.served_checkpoint import make_served_checkpoint

SEEN: list[Row] = []


@pytest.fixture(scope="session")
def seen() -> list[Row]:
    """Figures that tests add to; printed at the end. None of them decides about a test."""
    return SEEN


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take ``--figures-json FILE``; pytest keeps shorter names to itself."""
    parser.addoption("--figures-json", type=Path, metavar="FILE", help="write the figures seen as a JSON list to FILE")


def pytest_terminal_summary(config: pytest.Config) -> None:
    """Print what was measured, and write it where asked."""
    if SEEN:
        file = config.getoption("--figures-json")
        publish(SEEN, packages=("ray", "nixl", "torch"), json_file=file, title="Test hosts")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostCluster]:
    """Four machines that `ray up` made a cluster of. KV is most of their traffic: one token's has 6 KiB."""
    reason = why_not()
    if reason is not None:
        pytest.exit(f"test hosts cannot be made here: {reason}", returncode=1)
    model = tmp_path_factory.mktemp("model")
    make_served_checkpoint(model, head_dim=64, num_key_value_heads=4)
    hosts = Hosts({"RAY_REDIS_ADDRESS": f"{OPERATOR}:{PORT}", "BATON_REDIS_PASSWORD": PASSWORD})
    try:
        hosts.open()
        with running_redis(hosts.folder):
            yield HostCluster.start(hosts, model=model)
            hosts.kill_all()
    finally:
        hosts.close()


@pytest.fixture(scope="session")
def known(cluster: HostCluster) -> KnownAnswers:
    """64 prompts, and what one engine says to them."""
    return KnownAnswers.of(cluster.model)
