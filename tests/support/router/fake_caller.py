"""A fake of Serve's handles: replicas are plain functions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from router.pool.workers import WorkerUnavailableError

Method = Callable[..., Awaitable[Any]]


class FakeCaller:
    """Holds the functions of the replicas; :attr:`replicas` can be changed at any time."""

    def __init__(self, replicas: dict[str, dict[str, Method]] | None = None) -> None:
        self.replicas = replicas or {}
        self.is_connected = False

    def connect(self) -> None:
        """Note the call."""
        self.is_connected = True

    def replica_ids(self) -> Sequence[str]:
        """The current replicas."""
        return list(self.replicas)

    async def call(self, replica_id: str, method: str, *args: object, timeout_s: float) -> Any:
        """Call the function, within the time."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.replicas[replica_id][method](*args)
        except TimeoutError as error:
            raise WorkerUnavailableError(replica_id=replica_id, reason="no answer") from error

    async def stream(self, replica_id: str, method: str, *args: object) -> AsyncIterator[Any]:
        """Yield what the function's result holds."""
        for item in await self.replicas[replica_id][method](*args):
            yield item
