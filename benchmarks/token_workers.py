"""Workers that produce tokens without computing, with the interface of Baton's workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

from ray import serve

from benchmarks.serve_stage import STEP_VARIABLE
from cluster.serve.workers import WorkerSettings
from engine.contract.messages import FinishReason, GenerateRequest, LoadReport, StepMessage, TokenDelta, WorkerInfo
from engine.contract.step_frame import pack_step
from engine.frontend.call_answers import answer_call
from engine.frontend.client_stream import MESSAGE_GAP_S, ClientStream
from kv_transfer.params import PROTOCOL_VERSION, KVTransferParams, PeerIdentity
from router.text.tokenizer import Tokenizer
from router.wire.frame_connection import FrameConnection
from router.wire.frame_server import FrameOffer, FrameServer

WORD = " and"
STEP_S = float(os.environ.get(STEP_VARIABLE, "1")) / 1e3
"""Duration of a step of the simulated engine. The default is shorter than that of any real engine, but long enough that
messages are still per step.
"""

MAX_LATE_S = 0.01
"""How far the simulated engine may be behind before its clock is reset; up to that it makes up for missed time."""


class TokenWorker:
    """Behaves like a real worker: batched submissions, one message per step, one stream per router."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._role = settings.role
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        self._token = Tokenizer.load(settings.engine.model.path).encode(WORD, add_special_tokens=False)[-1]
        self._model_name = settings.model_name
        self._report_period_s = settings.report_period_s
        self._streams: dict[str, ClientStream] = {}
        self._running: dict[str, list[Any]] = {}
        self._stepping: asyncio.Task[None] | None = None
        self._frames: FrameServer | None = None

    async def status(self) -> tuple[WorkerInfo, LoadReport]:
        """Report constants and load."""
        info = WorkerInfo(
            role=self._role.name,
            engine_id=self._replica_id,
            incarnation="1",
            node_ip="127.0.0.1",
            pid=os.getpid(),
            model_name=self._model_name,
            block_size=16,
            num_blocks=1 << 20,
            block_bytes=1024,
            max_model_len=4096,
            vocab_size=1 << 20,
            device="cpu",
            dtype="float32",
        )
        return info, self._load()

    def _load(self) -> LoadReport:
        return LoadReport(num_blocks=1 << 20, num_free_blocks=1 << 20, num_running=len(self._running))

    async def submit(self, requests: Sequence[GenerateRequest]) -> list[None]:
        """Accept requests; a prompt's first token comes immediately, later ones step by step."""
        if not self._role.decodes:
            for request in requests:
                self._streams[request.client_id].put((self._first(request),))
        else:
            for request in requests:
                left = request.sampling.max_tokens - len(request.output_token_ids)
                self._running[request.request_id] = [request.client_id, left]
            if self._stepping is None:
                self._stepping = asyncio.create_task(self._step())
        return [None] * len(requests)

    def _first(self, request: GenerateRequest) -> TokenDelta:
        if request.sampling.max_tokens <= 1:
            return TokenDelta(request.request_id, (self._token,), FinishReason.LENGTH, num_cached_tokens=0)
        params = KVTransferParams(
            protocol_version=PROTOCOL_VERSION,
            source=PeerIdentity(engine_id=self._replica_id, incarnation="1"),
            lease_id=request.request_id,
            layout_hash="none",
            block_ids=((0,),),
            num_tokens=len(request.prompt_token_ids),
        )
        return TokenDelta(
            request.request_id, (self._token,), FinishReason.HANDED_OVER, kv_transfer=params, num_cached_tokens=0
        )

    async def _step(self) -> None:
        token_ids = (self._token,)
        due_s = time.monotonic()
        while self._running:
            deltas: dict[str, list[TokenDelta]] = {}
            for request_id, row in list(self._running.items()):
                row[1] -= 1
                reason = None if row[1] else FinishReason.LENGTH
                deltas.setdefault(row[0], []).append(TokenDelta(request_id, token_ids, reason))
                if reason is not None:
                    del self._running[request_id]
            for client_id, of_client in deltas.items():
                if (stream := self._streams.get(client_id)) is not None:
                    stream.put(of_client)
            now_s = time.monotonic()
            due_s = max(due_s + STEP_S, now_s - MAX_LATE_S)
            await asyncio.sleep(max(0.0, due_s - now_s))
        self._stepping = None

    async def offer_outputs(self, client_id: str, mirrors_cache: bool) -> FrameOffer | None:
        """The socket of a real worker's stream."""
        if self._frames is None:
            self._frames = FrameServer()
            await self._frames.start()
        return self._frames.offer(partial(self._write, client_id, mirrors_cache), partial(answer_call, self))

    async def _write(self, client_id: str, mirrors_cache: bool, connection: FrameConnection) -> None:
        async with contextlib.aclosing(self.outputs(client_id, mirrors_cache)) as frames:
            async for frame in frames:
                connection.send(frame)
                await connection.drained()

    async def outputs(self, client_id: str, mirrors_cache: bool = False) -> AsyncGenerator[bytes]:  # noqa: ARG002
        """Send one frame per step."""
        stream = self._streams[client_id] = ClientStream(min_gap_s=MESSAGE_GAP_S)
        try:
            yield pack_step(StepMessage(deltas=(), load=self._load()))
            while True:
                deltas = await stream.take(timeout_s=self._report_period_s)
                yield pack_step(StepMessage(deltas=tuple(deltas), load=self._load()))
        finally:
            del self._streams[client_id]

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests."""
        for request_id in request_ids:
            self._running.pop(request_id, None)

    async def move_out(self, request_ids: Sequence[str], *, only_waiting: bool = False) -> None:
        """Move nothing: these measurements have no moves."""
