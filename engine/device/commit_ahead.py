"""Has the system commit the memory of a KV cache in a thread, ahead of its use."""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
from typing import Final

import torch

from engine.device.cores import run_anywhere

COMMIT_BYTES: Final = 2 << 20
"""How much is committed at once: a huge page."""

SMALL_BYTES: Final = 4 * COMMIT_BYTES
"""The memory of caches that are smaller is committed as it is used: they are filled soon."""

_MADV_POPULATE_WRITE: Final = 23
"""Linux's constant, since 5.14."""

logger = logging.getLogger(f"baton.{__name__}")


class CommitAhead:
    """Commits the memory of ``blocks``, on a CPU, up to ``ahead_bytes`` beyond what is in use.

    The system commits memory when it is first written. On virtual machines, whose host has to find memory too, a huge
    page was measured to take 5 ms: the hand-over of a prompt of 700 tokens, with 12 KiB each, waited 20 ms for pages,
    and 2 ms for the copy. A thread that commits them before, on a core that may be idle, takes this from hand-overs and
    prompts. Not all is committed at the start, because most caches never fill up.

    It changes no content. Where the system cannot do it, nothing happens. Used from one thread.
    """

    def __init__(self, blocks: torch.Tensor, *, ahead_bytes: int) -> None:
        self._blocks = blocks
        self._end = blocks.numel() * blocks.element_size()
        self._ahead_bytes = ahead_bytes
        self._wanted = self._committed = 0
        self.enough_for = -1
        """With so many bytes in use there is nothing to do, and never will be: what is committed only grows."""
        self._thread: threading.Thread | None = None
        self._is_over = sys.platform != "linux" or blocks.device.type != "cpu" or self._end < SMALL_BYTES
        self.use(0)

    @property
    def num_committed(self) -> int:
        """How many of the first bytes it has committed so far."""
        return self._committed

    def use(self, num_bytes: int) -> None:
        """Let the memory beyond the first ``num_bytes`` be committed; these are in use, or were. Returns at once.

        A thread runs only while a quarter of what is kept ahead is missing, or the rest of the memory.
        """
        self._wanted = max(self._wanted, min(num_bytes + self._ahead_bytes, self._end))
        num_missing = self._wanted - self._committed
        is_enough = num_missing <= 0 or num_missing < min(self._ahead_bytes // 4, self._end - self._committed)
        if is_enough or self._is_over:
            self.enough_for = max(self.enough_for, num_bytes)
        elif self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._commit, name="baton-kv-commit", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait until no thread runs."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Commit nothing any more: the memory may go. Idempotent."""
        self._is_over = True
        self.wait()

    def _commit(self) -> None:
        run_anywhere()  # not on the core that computes
        advise = ctypes.CDLL(None, use_errno=True).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        while self._committed < self._wanted and not self._is_over:
            num_bytes = min(COMMIT_BYTES, self._end - self._committed)
            if advise(self._blocks.data_ptr() + self._committed, num_bytes, _MADV_POPULATE_WRITE) != 0:
                logger.info("KV memory is committed as it is used: errno=%d", ctypes.get_errno())
                self._is_over = True
                return
            self._committed += num_bytes
