"""Compares what arrived with the checksums its source made: large parts while the next one is copied."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from kv_transfer.block_memory import BlockMemory

if TYPE_CHECKING:
    from kv_transfer.part_reads import Part

_MIN_BYTES_FOR_THREAD = 1 << 20
"""Below that the way to another thread takes longer than the comparison."""


class Verifier:
    """Owned by the connector's thread. Copies and checksums both let other threads run, so that the one hides behind
    the other where there is a second core. ``on_done`` is called in the verifying thread.
    """

    def __init__(self, memory: BlockMemory | None, *, name: str, on_done: Callable[[], None]) -> None:
        self._memory = memory
        self._on_done = on_done
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"baton-kv-verify-{name}")

    def begin(self, part: Part) -> Future[list[int]]:
        """Find the blocks of a part that are not as the source had them. A small part is done when this returns."""
        if part.num_bytes < _MIN_BYTES_FOR_THREAD or part.checksums is None or self._memory is None:
            verified: Future[list[int]] = Future()
            verified.set_result(self.check(part))
            return verified
        verified = self._pool.submit(self.check, part)
        verified.add_done_callback(lambda _: self._on_done())
        return verified

    def check(self, part: Part) -> list[int]:
        """The same, here and now."""
        if part.checksums is None or self._memory is None:
            return []
        found = self._memory.checksums(part.block_ids)
        return [
            block_id
            for block_id, ours, theirs in zip(part.block_ids, found, part.checksums, strict=True)
            if ours != theirs
        ]

    def close(self) -> None:
        """Wait for what is under way: after this nothing looks at the memory."""
        self._pool.shutdown(wait=True, cancel_futures=True)
