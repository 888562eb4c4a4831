"""A worker around one engine: when it counts as healthy, and what does not hold it up."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from decode.server import DecodeServer
from engine.contract.errors import ConnectorDeadError
from kv_transfer.inproc import InProcessFabric
from tests.support.engine.disaggregated import inproc_builder
from tests.support.engine.engine_pools import INPROC, chain_engines


class BusyConnector:
    """A connector that gets to a handshake when the test lets it."""

    def __init__(self) -> None:
        self.is_free = threading.Event()

    def accept(self, hello: Any) -> Any:
        """Answer with the same."""
        assert self.is_free.wait(10), "the event loop waited for the connector"
        return hello


async def test_handshake_keeps_nothing_else_waiting_on_the_event_loop() -> None:
    """The connector answers between its reads, and may be busy with one; the streams of all routers go on."""
    core, info = chain_engines(16, 0)("decode", "d", 64, inproc_builder(InProcessFabric(), "d", INPROC))
    connector: Any = BusyConnector()
    server = DecodeServer(core, info=info, connector=connector)
    hello: Any = object()

    meeting = asyncio.create_task(server.handshake(hello))
    await asyncio.sleep(0)
    connector.is_free.set()

    assert await meeting is hello
    core.close()


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
