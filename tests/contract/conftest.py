"""The connectors that the contract suite runs on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kv_transfer.registry import TIERS
from tests.support.engine.kv_engine import KVEngine
from tests.support.kv.kv_world import KVWorld
from tests.support.kv.ucx import confined_ucx


@pytest.fixture(
    scope="package",
    params=["inproc", *(f"inproc-{tier}" for tier in TIERS), "nixl-default", "nixl-tcp", "nixl-local"],
)
def world(request: pytest.FixtureRequest) -> Iterator[KVWorld]:
    with confined_ucx(transports="tcp,self" if request.param == "nixl-tcp" else None):
        world = KVWorld(
            request.param.partition("-")[0],
            tiers=tuple(tier for tier in TIERS if request.param.endswith(f"-{tier}")),
            transport="local" if request.param == "nixl-local" else "network",
        )
        yield world
        world.close()


@pytest.fixture(scope="package")
def source(world: KVWorld) -> Any:
    return world.make_source(world.spec("source"))


@pytest.fixture(scope="package")
def reader(world: KVWorld) -> KVEngine:
    return world.make_reader(world.spec("reader"))


@pytest.fixture
def request_id(world: KVWorld) -> str:
    return world.unique("request")
