"""The memory of a KV cache is committed ahead of its use, and keeps its content."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from engine.device import commit_ahead
from engine.device.commit_ahead import COMMIT_BYTES, CommitAhead
from engine.device.kv_cache import KVCache
from kv_transfer.layout import KVLayout, group_layers

NUM_BLOCKS = 1024
AHEAD_BYTES = 4 * COMMIT_BYTES


def cache() -> KVCache:
    """A cache of 64 MiB."""
    layout = KVLayout(
        model_hash="m",
        groups=group_layers([None] * 4),
        num_kv_heads=4,
        head_dim=32,
        block_size=16,
        dtype="float32",
        bytes_per_element=4,
    )
    assert NUM_BLOCKS * layout.block_bytes == 64 << 20
    return KVCache(layout, num_blocks=NUM_BLOCKS, dtype=torch.float32, device=torch.device("cpu"))


@contextmanager
def committing(blocks: torch.Tensor) -> Iterator[CommitAhead]:
    """Closed at the end."""
    ahead = CommitAhead(blocks, ahead_bytes=AHEAD_BYTES)
    try:
        yield ahead
    finally:
        ahead.close()


def num_resident(blocks: torch.Tensor) -> int:
    """The number of bytes that the system has committed."""
    num_bytes = blocks.numel() * blocks.element_size()
    pages = (ctypes.c_ubyte * (num_bytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(blocks.data_ptr()), ctypes.c_size_t(num_bytes), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_so_much_is_committed_beyond_what_is_in_use_and_not_more() -> None:
    blocks = cache().blocks
    with committing(blocks) as ahead:
        ahead.wait()
        assert ahead.num_committed == AHEAD_BYTES <= num_resident(blocks)

        ahead.use(10 * COMMIT_BYTES)
        ahead.use(3 * COMMIT_BYTES)

        ahead.wait()
        assert ahead.num_committed == 10 * COMMIT_BYTES + AHEAD_BYTES <= num_resident(blocks) < 64 << 20


def test_a_little_use_commits_nothing_yet_and_nothing_is_committed_beyond_the_end() -> None:
    blocks = cache().blocks
    with committing(blocks) as ahead:
        ahead.wait()

        ahead.use(COMMIT_BYTES - 1)
        ahead.wait()
        assert ahead.num_committed == AHEAD_BYTES
        ahead.use((64 << 20) - AHEAD_BYTES - 1)
        ahead.wait()
        ahead.use(64 << 20)

        ahead.wait()
        assert ahead.num_committed == num_resident(blocks) == 64 << 20
        ahead.use(64 << 20)
        assert ahead.enough_for == 64 << 20


def test_what_is_enough_once_stays_enough_and_is_not_more() -> None:
    """``use`` need not be called with less than ``enough_for``: it would not do anything."""
    with committing(cache().blocks) as ahead:
        ahead.wait()
        ahead.use(COMMIT_BYTES - 1)
        assert ahead.enough_for == COMMIT_BYTES - 1

        ahead.use(COMMIT_BYTES)  # a quarter of what is kept ahead is missing

        assert ahead.enough_for == COMMIT_BYTES - 1
        ahead.wait()
        ahead.use(COMMIT_BYTES)
        assert ahead.enough_for == COMMIT_BYTES
        ahead.use(0)
        assert ahead.enough_for == COMMIT_BYTES
        assert ahead.num_committed == COMMIT_BYTES + AHEAD_BYTES


def test_memory_is_not_committed_on_the_core_of_the_thread_that_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[str] = []
    monkeypatch.setattr(commit_ahead, "run_anywhere", lambda: freed.append(threading.current_thread().name))

    with committing(cache().blocks) as ahead:
        ahead.wait()

    assert freed == ["baton-kv-commit"]


def test_a_closed_one_commits_nothing() -> None:
    with committing(cache().blocks) as ahead:
        ahead.wait()
        ahead.close()

        ahead.use(64 << 20)
        ahead.close()

        assert ahead.num_committed == AHEAD_BYTES


def test_small_memory_is_left_alone() -> None:
    with committing(cache().blocks[: NUM_BLOCKS // 16]) as ahead:
        ahead.use(1 << 20)
        ahead.wait()

        assert ahead.num_committed == 0


def test_content_stays() -> None:
    blocks = cache().blocks
    blocks[::7] = 3.0
    with committing(blocks) as ahead:
        ahead.use(64 << 20)
        blocks[1::7] = 4.0
        ahead.wait()

    expected = torch.zeros_like(blocks)
    expected[::7], expected[1::7] = 3.0, 4.0
    assert torch.equal(blocks, expected)
