"""A worker around one engine: what both roles have in common. A plain class; ``cluster/`` makes an actor of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

from engine.contract.errors import ConnectorDeadError, RequestRefusedError
from engine.contract.messages import CacheReset, GenerateRequest, LoadReport, StepMessage, WorkerInfo
from engine.frontend.async_engine import STEP_TIMEOUT_S, AsyncEngine
from engine.frontend.engine_core import EngineCore
from kv_transfer.connector import PeerWorkerConnector
from kv_transfer.params import Hello


class EngineServer:
    """Takes requests in batches, and answers on one stream per front end."""

    def __init__(
        self,
        core: EngineCore,
        *,
        info: WorkerInfo,
        connector: PeerWorkerConnector,
        report_period_s: float = 0.5,
        step_timeout_s: float = STEP_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = AsyncEngine(core, name=info.role, step_timeout_s=step_timeout_s, clock=clock)
        self._connector = connector
        self._info = info
        self._report_period_s = report_period_s

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
        """Raise EngineDeadError if this worker cannot serve any more, hangs, or has lost its connector's thread."""
        self._engine.check_health()
        if not self._connector.is_alive:
            raise ConnectorDeadError

    async def submit(self, requests: Sequence[GenerateRequest]) -> list[RequestRefusedError | None]:
        """Add requests whose tokens go to the stream of their ``client_id``. One answer each, in order.

        Raises:
            EngineDeadError: The engine ended; nothing was added.
        """
        return await self._engine.submit(requests)

    def outputs(self, client_id: str, mirrors_cache: bool = False) -> AsyncIterator[StepMessage]:
        """Yield one message a step with all that is new for a client, and the load at least once a report period.

        With ``mirrors_cache`` they also tell what is in the prefix cache, if the engine records that. Closing the
        iterator aborts the client's requests: its router is gone.
        """
        return self._engine.outputs(client_id, report_period_s=self._report_period_s, mirrors_cache=mirrors_cache)

    def resync_cache(self, client_id: str) -> None:
        """Let the next message to a client tell of the whole prefix cache."""
        self._engine.resync_cache(client_id)

    async def reset_prefix_cache(self, *, preempt_running: bool) -> CacheReset | None:
        """Drop the prefix cache, tiers included; None where requests hold blocks and may not be preempted."""
        return await self._engine.reset_prefix_cache(preempt_running=preempt_running)

    def note_peers(self, num_peers: int) -> None:
        """Say in reports how many workers of the other role were met."""
        self._engine.num_peers = num_peers

    @property
    def has_hung_read(self) -> bool:
        """True while a read of KV hangs for good: only the end of this process is sure to end it."""
        return self._connector.has_hung_read

    @property
    def is_draining(self) -> bool:
        """True when it takes no more requests."""
        return self._engine.is_draining

    def stop_admissions(self) -> None:
        """Take no more requests; those that are here go on."""
        self._engine.stop_admissions()

    async def drain(self, *, moves_out: bool, timeout_s: float) -> bool:
        """Take no more requests, let those that are here go, and end the streams.

        Returns:
            False when something was left after ``timeout_s``.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._engine.drain(moves_out=moves_out)
        except TimeoutError:
            return False
        finally:
            self._engine.end_streams()
        return True

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests in any state, the leases of finished ones included; unknown ids are ignored."""
        await self._engine.abort(request_ids)

    async def handshake(self, hello: Hello) -> Hello:
        """Meet another worker. The connector gets to it between its reads; nothing else waits for that here.

        Raises:
            HandshakeRefusedError: Its protocol version or layout differs from ours.
        """
        return await asyncio.to_thread(self._connector.accept, hello)
