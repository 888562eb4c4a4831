"""Weights lie in huge pages, one behind the other, and go when the last of a chunk goes."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch

from engine.device.huge_pages import ALIGNMENT, CHUNK_BYTES, HUGE_PAGE, SWITCH, HugePages


def _flags_at(address: int) -> set[str]:
    """The flags of the mapping at an address, as the system lists them; empty if nothing is mapped there."""
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE):
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", mapping)
        if span and int(span[1], 16) <= address < int(span[2], 16):
            return set(mapping.split("VmFlags:")[1].split())
    return set()


def test_tensors_of_all_sizes_keep_what_is_written_to_them() -> None:
    pages = HugePages()
    sizes = [1, 100, 3 << 20, CHUNK_BYTES - 5, CHUNK_BYTES, CHUNK_BYTES + 1, 7]
    tensors = [pages.empty(size, dtype=torch.uint8).fill_(number) for number, size in enumerate(sizes)]
    halves = pages.empty(3, 5, dtype=torch.bfloat16).fill_(0.5)

    assert [len(tensor) for tensor in tensors] == sizes
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))
    assert halves.is_contiguous()
    assert halves.float().sum() == 7.5
    assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in (*tensors, halves))


def test_memory_asks_for_huge_pages_and_starts_at_one() -> None:
    tensor = HugePages().empty(HUGE_PAGE, dtype=torch.uint8)

    assert tensor.data_ptr() % HUGE_PAGE == 0
    assert "hg" in _flags_at(tensor.data_ptr())


def test_operator_turns_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    monkeypatch.setattr("engine.device.huge_pages.map_huge", lambda num_bytes: pytest.fail(f"{num_bytes} mapped"))

    assert HugePages().empty(5, dtype=torch.float32).fill_(2.0).sum() == 10.0


def test_chunk_goes_with_its_last_tensor() -> None:
    pages = HugePages()
    first, second = (pages.empty(CHUNK_BYTES // 2, dtype=torch.uint8) for _ in range(2))
    address = first.data_ptr()
    assert second.data_ptr() == address + CHUNK_BYTES // 2
    following = pages.empty(1, dtype=torch.uint8)

    del first
    gc.collect()
    assert "hg" in _flags_at(address)
    del second
    gc.collect()
    assert "hg" not in _flags_at(address)
    assert following.fill_(1) == 1
