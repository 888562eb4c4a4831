"""What every connector owes an engine, held by each: in one process, and with NIXL between processes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kv_transfer.connector import LeaseEnd
from kv_transfer.inproc import InProcessFabric
from tests.support.kv_child import ChildProcess, PipeRendezvous
from tests.support.kv_engine import KVEngine, KVEngineSpec

SERIAL = itertools.count()


class World:
    """Makes readers here and sources where the connector under test needs them."""

    def __init__(self, connector: str) -> None:
        self.connector = connector
        self.fabric = InProcessFabric()
        self.rendezvous = PipeRendezvous()
        self.child = ChildProcess() if connector == "nixl" else None
        self.engines: list[Any] = []

    def spec(self, name: str, **changes: Any) -> KVEngineSpec:
        """A spec with an engine id of its own."""
        return replace(KVEngineSpec(engine_id=f"{name}-{next(SERIAL)}", connector=self.connector), **changes)

    def make_reader(self, spec: KVEngineSpec) -> KVEngine:
        """An engine in this process."""
        engine = KVEngine(spec, self.rendezvous, self.fabric)
        self.engines.append(engine)
        return engine

    def make_source(self, spec: KVEngineSpec) -> Any:
        """An engine that can be read from: in the other process where there is one."""
        if self.child is None:
            return self.make_reader(spec)
        engine = self.child.create(spec)
        self.rendezvous.engines[spec.engine_id] = engine
        self.engines.append(engine)
        return engine

    def close(self) -> None:
        """Close all engines, then the process."""
        for engine in self.engines:
            engine.close()
        if self.child is not None:
            self.child.close()


@pytest.fixture(scope="module", params=["inproc", "nixl-default", "nixl-tcp"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "nixl-tcp":
            patch.setenv("UCX_TLS", "tcp,self")
        world = World(request.param.partition("-")[0])
        yield world
        world.close()


@pytest.fixture(scope="module")
def source(world: World) -> Any:
    return world.make_source(world.spec("source"))


@pytest.fixture(scope="module")
def reader(world: World) -> KVEngine:
    return world.make_reader(world.spec("reader"))


@pytest.fixture
def request_id() -> str:
    return f"request-{next(SERIAL)}"


@pytest.mark.parametrize(
    "source_block_ids, block_ids",
    [
        ((0, 1, 2, 3), (4, 5, 6, 7)),
        ((9, 3, 40, 12, 13), (1, 60, 7, 8, 2)),
        ((63,), (0,)),
        (tuple(range(64)), tuple(reversed(range(64)))),
    ],
)
def test_blocks_arrive_bit_exact(
    source: Any, reader: KVEngine, request_id: str, source_block_ids: tuple[int, ...], block_ids: tuple[int, ...]
) -> None:
    source.fill(source_block_ids, next(SERIAL))
    params = source.grant(request_id, source_block_ids)

    ended = reader.load(request_id, params, block_ids)

    assert ended.error is None
    assert ended.failed_block_ids == ()
    assert ended.num_bytes == len(block_ids) * reader.spec.layout.block_bytes
    assert reader.content(block_ids) == source.content(source_block_ids)
    assert source.wait_lease(params.lease_id).reason is LeaseEnd.DONE
