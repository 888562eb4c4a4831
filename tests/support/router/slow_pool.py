"""Decode workers whose calls wait at a gate."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from engine.contract.messages import GenerateRequest
from router.pool.workers import WorkerRefusedError
from tests.support.router.fake_workers import FakeDecodePool, FakePrefillPool


class SlowPool(FakeDecodePool):
    """A decode pool whose calls wait at a gate and are written down."""

    def __init__(self) -> None:
        super().__init__(prefill=FakePrefillPool())
        self.calls: list[list[str]] = []
        self.may_enter = asyncio.Event()
        self.fault: Exception | None = None
        self.refused: set[str] = set()

    async def submit(self, replica_id: str, requests: Sequence[GenerateRequest]) -> Sequence[WorkerRefusedError | None]:
        self.calls.append([request.request_id for request in requests])
        await self.may_enter.wait()
        if self.fault is not None:
            raise self.fault
        refusal = WorkerRefusedError("no", code="queue_full")
        return [refusal if request.request_id in self.refused else None for request in requests]
