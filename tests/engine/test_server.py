"""A worker around one engine: when it counts as healthy."""

from __future__ import annotations

import pytest

from decode.server import DecodeServer
from engine.errors import ConnectorDeadError
from kv_transfer.inproc import InProcessFabric
from tests.support.disaggregated import inproc_builder
from tests.support.engine_pools import INPROC, chain_engines


async def test_worker_whose_connector_ended_is_not_healthy() -> None:
    core, info = chain_engines(16, 0)("decode", "d", 64, inproc_builder(InProcessFabric(), "d", INPROC))
    assert core.connector is not None
    server = DecodeServer(core, info=info, connector=core.connector)
    server.start()
    server.check_health()

    core.connector.close()

    with pytest.raises(ConnectorDeadError):
        server.check_health()
    await server.close()
