"""Settings of the memory allocators: the C library's, oneDNN's caches, and torch's on a GPU."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""glibc's constants, from its malloc.h."""

_TRIM_BYTES = (1 << 31) - 1
_MMAP_BYTES = 1 << 30


_KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Sizes of oneDNN's own kernel cache and of torch's in front of it. Each reads its variable at first use."""

MAX_KERNELS = 448
"""Kernels that each cache keeps. The default is 1,024, at half a megabyte each. A model needs about five kinds of
products in 80 sizes up to 2,048 tokens (``engine/layers/packed_weight.py``). All of these fit: kernels that are evicted
and made again would fragment the heap."""


def bound_kernel_caches() -> None:
    """Let oneDNN and torch keep fewer kernels. Call it before the first product. Variables that are already set win."""
    for name in _KERNEL_CACHES:
        os.environ.setdefault(name, str(MAX_KERNELS))


def keep_freed_memory() -> bool:
    """Keep up to 2 GiB that this process frees, and let threads that start from now on share one heap.

    A step's tensors come from ``malloc``, and glibc returns large freed ones to the system. The next step then gets new
    pages, each with a page fault and 4 KiB to zero, which measurably slows long prefills.
    The price: a process stays as large as its largest steps made it.

    Returns:
        False where there is no such allocator; nothing is changed then.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    options = {_M_TRIM_THRESHOLD: _TRIM_BYTES, _M_MMAP_THRESHOLD: _MMAP_BYTES, _M_ARENA_MAX: 1}
    return all(set_option(option, value) == 1 for option, value in options.items())


VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with the settings of torch's allocator; the first one that is set counts."""


def without_expandable_segments(settings: str) -> str:
    """The same settings of torch's allocator, with expandable segments off."""
    return re.sub(r"(expandable_segments\s*:\s*)true", r"\1False", settings, flags=re.IGNORECASE)


@contextmanager
def plain_memory(environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """Inside the block, tensors are allocated with ``cudaMalloc``, whatever torch's allocator is set to otherwise.

    Expandable segments are mapped from pieces, and UCX cannot register those with network cards or share them with
    other processes: transfers would fail or go through the host.
    """
    environment = os.environ if environment is None else environment
    settings = next((environment[name] for name in VARIABLES if environment.get(name)), "")
    plain = without_expandable_segments(settings)
    if plain == settings:
        yield
        return
    _set(plain)
    try:
        yield
    finally:
        _set(settings)


def _set(settings: str) -> None:
    if hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        torch._C._accelerator_setAllocatorSettings(settings)
    else:  # before torch 2.10
        torch.cuda.memory._set_allocator_settings(settings)
