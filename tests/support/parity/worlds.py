"""Worlds that several cells use one after the other, because building engines and router is most of a cell's cost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from tests.support.parity.setup import Setup
from tests.support.parity.world import World, world


class Worlds:
    """Keeps the last world until another one is needed or a cell failed. All calls come from one event loop."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._kept: tuple[Path, Setup, World] | None = None

    @asynccontextmanager
    async def cell(self, path: Path, setup: Setup, *, is_left_whole: bool = True) -> AsyncIterator[World]:
        """A world with empty caches and counters at 0. At the end of the block nothing may be held.

        ``is_left_whole``: the next cell may use it; otherwise nobody else does.
        """
        if not is_left_whole:
            async with world(path, setup) as made:
                yield made
            return
        made = await self._open(path, setup)
        try:
            await made.begin()
            yield made
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close the last world."""
        self._kept = None
        await self._stack.aclose()

    async def _open(self, path: Path, setup: Setup) -> World:
        if self._kept is None or self._kept[:2] != (path, setup):
            await self.close()
            self._kept = (path, setup, await self._stack.enter_async_context(world(path, setup)))
        return self._kept[2]
