"""A prefill and a decode engine in one process, joined by the in-process connector."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from engine.build import build_engine
from engine.contract.config import EngineConfig
from engine.contract.messages import FinishReason, GenerateRequest, TokenDelta
from engine.drafting.proposer import Drafting
from engine.frontend.engine_core import EngineCore
from engine.frontend.offline import IDLE_WAIT_S, StalledError
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


def generate_disaggregated(
    prefill: EngineCore, decode: EngineCore, requests: Iterable[GenerateRequest]
) -> dict[str, list[int]]:
    """Return the output tokens of each request, prefilled on one engine and decoded on another, in one process."""
    wanted = list(requests)
    outputs: dict[str, list[int]] = {request.request_id: [] for request in wanted}
    for delta in run_disaggregated(prefill, decode, wanted):
        outputs[delta.request_id].extend(delta.token_ids)
    return outputs


def run_disaggregated(
    prefill: EngineCore, decode: EngineCore, requests: Iterable[GenerateRequest]
) -> Iterator[TokenDelta]:
    """Yield every delta of ``requests``, prefilled on one engine and decoded on another, in one process.

    Both engines step in turn, so that loads, leases and decoding of different requests overlap as they do when the
    engines are processes.

    Raises:
        RequestRefusedError: A request can never be served.
        StalledError: Nothing moved for ``IDLE_WAIT_S``.
    """
    pending = {request.request_id: request for request in requests}
    for request in pending.values():
        prefill.add_request(dataclasses.replace(request, hand_over=True))
    while prefill.has_unfinished() or decode.has_unfinished():
        moved = False
        for core in (prefill, decode):
            core.collect()
            if not core.has_work():
                continue
            moved = True
            for delta in core.step().deltas():
                if delta.finish_reason is FinishReason.HANDED_OVER:
                    decode.add_request(
                        dataclasses.replace(
                            pending[delta.request_id], output_token_ids=delta.token_ids, kv_transfer=delta.kv_transfer
                        )
                    )
                yield delta
        if not moved and not decode.wake.wait(IDLE_WAIT_S):
            raise StalledError(f"no progress for {IDLE_WAIT_S:.0f} s with unfinished requests")
        decode.wake.clear()
