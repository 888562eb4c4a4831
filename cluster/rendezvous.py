"""How engines meet for the first time: a call over Serve to the replica whose id is the engine's."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Sequence
from typing import Any

from cluster.refusal import HandshakeRefusal
from cluster.replica_caller import Caller
from kv_transfer.errors import PeerUnreachableError
from kv_transfer.params import Hello
from router.workers import WorkerUnavailableError

LOOKUP_PERIOD_S = 0.05


class ServeRendezvous:
    """``kv_transfer.connector.Rendezvous`` over Serve: reaches any worker of the deployments it was given.

    Engines carry their Serve replica id as engine id, so that no directory is needed. Calls are made on the replica's
    event loop, on whose behalf a connector's thread waits.
    """

    def __init__(self, callers: Sequence[Caller], *, loop: asyncio.AbstractEventLoop) -> None:
        self._callers = tuple(callers)
        self._loop = loop

    def connect(self) -> None:
        """Begin to follow the sets of replicas. Call it on the event loop."""
        for caller in self._callers:
            caller.connect()

    def meet(self, engine_id: str, hello: Hello, *, timeout_s: float) -> Hello:
        """Carry our hello to a peer and bring back its own.

        Raises:
            PeerUnreachableError: There is no such engine, or it did not answer in time.
            HandshakeRefusedError: The peer refused us.
        """
        future = asyncio.run_coroutine_threadsafe(self._meet(engine_id, hello, timeout_s=timeout_s), self._loop)
        try:
            # The coroutine keeps the deadline itself; this one holds if the event loop is stuck.
            answer = future.result(timeout_s + 1.0)
        except concurrent.futures.TimeoutError as error:
            future.cancel()
            raise PeerUnreachableError(engine_id=engine_id, reason=f"no answer within {timeout_s:g} s") from error
        except WorkerUnavailableError as error:
            raise PeerUnreachableError(engine_id=engine_id, reason=error.reason) from error
        if isinstance(answer, HandshakeRefusal):
            raise answer.to_error()
        return answer

    async def _meet(self, engine_id: str, hello: Hello, *, timeout_s: float) -> Hello | HandshakeRefusal:
        deadline_s = self._loop.time() + timeout_s
        caller = await self._caller_of(engine_id, deadline_s=deadline_s)
        answer: Any = await caller.call(
            engine_id, "handshake", hello, timeout_s=max(deadline_s - self._loop.time(), LOOKUP_PERIOD_S)
        )
        if not isinstance(answer, (Hello, HandshakeRefusal)):
            raise PeerUnreachableError(engine_id=engine_id, reason=f"answered with a {type(answer).__name__}")
        return answer

    async def _caller_of(self, engine_id: str, *, deadline_s: float) -> Caller:
        """Find the deployment that has this replica; a replica that just started may not be known here yet."""
        while True:
            for caller in self._callers:
                if engine_id in caller.replica_ids():
                    return caller
            if self._loop.time() + LOOKUP_PERIOD_S > deadline_s:
                raise WorkerUnavailableError(replica_id=engine_id, reason="no running replica has this id")
            await asyncio.sleep(LOOKUP_PERIOD_S)
