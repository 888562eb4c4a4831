"""A prefill and a decode engine in one process, joined by the in-process connector."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.build import build_engine
from engine.contract.config import EngineConfig
from engine.drafting.proposer import Drafting
from engine.frontend.engine_core import EngineCore
from kv_transfer.connector import Connector, ConnectorBuilder, WakeCallback
from kv_transfer.factory import build_connector
from kv_transfer.inproc import InProcessFabric
from kv_transfer.layout import KVLayout, KVRegion
from kv_transfer.options import ConnectorOptions
from kv_transfer.params import PeerIdentity

CoreBuilder = Callable[[ConnectorBuilder], EngineCore]


def inproc_builder(fabric: InProcessFabric, engine_id: str, options: ConnectorOptions) -> ConnectorBuilder:
    """Builds the connector of one engine of ``fabric``."""

    def build(layout: KVLayout, region: KVRegion, wake: WakeCallback) -> Connector:
        return build_connector(
            options,
            identity=PeerIdentity(engine_id=engine_id, incarnation="1"),
            layout=layout,
            region=region,
            rendezvous=fabric,
            wake=wake,
            fabric=fabric,
        )

    return build


@contextmanager
def joined_cores(
    build_prefill: CoreBuilder, build_decode: CoreBuilder, options: ConnectorOptions | None = None
) -> Iterator[tuple[EngineCore, EngineCore]]:
    """Build both engines around one fabric; their connectors are closed at the end."""
    fabric = InProcessFabric()
    options = options or ConnectorOptions(connector="inproc", streamed=True)
    prefill = build_prefill(inproc_builder(fabric, "prefill", options))
    try:
        decode = build_decode(inproc_builder(fabric, "decode", options))
        try:
            yield prefill, decode
        finally:
            decode.close()
    finally:
        prefill.close()


@contextmanager
def inproc_pair(config: EngineConfig, *, drafting: Drafting | None = None) -> Iterator[tuple[EngineCore, EngineCore]]:
    """Two real engines of the same settings."""

    def build(build_connector: ConnectorBuilder) -> EngineCore:
        return build_engine(config, build_connector=build_connector, drafting=drafting).core

    with joined_cores(build, build) as pair:
        yield pair
