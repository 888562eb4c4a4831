"""The prefill worker: computes prompts, samples first tokens, and keeps the blocks until a decode worker read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from engine.async_engine import LOCAL_CLIENT, AsyncEngine
from engine.engine_core import EngineCore
from engine.messages import GenerateRequest, LoadReport, TokenDelta, WorkerInfo
from kv_transfer.connector import WorkerConnector
from kv_transfer.params import Hello


class PrefillServer:
    """A plain class over one engine; ``cluster/`` makes an actor of it."""

    def __init__(self, core: EngineCore, *, info: WorkerInfo, connector: WorkerConnector) -> None:
        self._engine = AsyncEngine(core, name="prefill")
        self._connector = connector
        self._info = info

    def start(self) -> None:
        """Start the engine on the running event loop."""
        self._engine.start()

    async def close(self) -> None:
        """End everything. Idempotent."""
        await self._engine.close()

    def info(self) -> WorkerInfo:
        """What does not change."""
        return self._info

    def load(self) -> LoadReport:
        """What does."""
        return self._engine.load

    def check_health(self) -> None:
        """Raise EngineDeadError if this worker cannot serve any more."""
        self._engine.check_health()

    async def prefill(self, request: GenerateRequest) -> tuple[TokenDelta, LoadReport]:
        """Compute a prompt and sample its first token; the blocks stay leased if decoding goes on elsewhere.

        Cancelling the call aborts the request.

        Raises:
            RequestRefusedError: The engine can never serve it.
            EngineDeadError: The engine ended before the request did.
        """
        delta = await self._engine.run_to_end(dataclasses.replace(request, hand_over=True, client_id=LOCAL_CLIENT))
        return delta, self._engine.load

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests in any state, the leases of finished ones included; unknown ids are ignored."""
        await self._engine.abort(request_ids)

    def handshake(self, hello: Hello) -> Hello:
        """Meet a decode worker.

        Raises:
            HandshakeRefusedError: Its protocol version or layout differs from ours.
        """
        return self._connector.accept(hello)
