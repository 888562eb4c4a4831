"""How memory is asked of the C library and of a GPU."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""glibc's names for them, from its malloc.h."""

_TRIM_BYTES = (1 << 31) - 1
_MMAP_BYTES = 1 << 30


_KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""oneDNN's own cache and torch's in front of it: each looks at its variable when it is used first."""

MAX_KERNELS = 448
"""Kernels that each of them keeps; by default 1,024, half a megabyte each. A model has about five kinds of products,
and up to 2,048 tokens there are 80 numbers of them (``engine/layers/packed_weight.py``): room for all, since what is
made again and again leaves gaps all over the heap."""


def bound_kernel_caches() -> None:
    """Let oneDNN and torch keep fewer kernels. Call it before the first product; what is set already stays."""
    for name in _KERNEL_CACHES:
        os.environ.setdefault(name, str(MAX_KERNELS))


def keep_freed_memory() -> bool:
    """Keep up to 2 GiB that this process frees, and let threads that start from now on share one heap.

    A step's tensors come from ``malloc``, and glibc gives large ones back to the system when they are freed: the next
    step gets new pages, each a fault and 4 KiB of zeros: a share of a long prefill that one sees.
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
"""Where torch takes the settings of its allocator from, the first that is set."""


def without_expandable_segments(settings: str) -> str:
    """The same settings of torch's allocator, but that memory comes in pieces of a fixed size."""
    return re.sub(r"(expandable_segments\s*:\s*)true", r"\1False", settings, flags=re.IGNORECASE)


@contextmanager
def plain_memory(environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """Tensors made here lie in memory from ``cudaMalloc``, whatever torch's allocator is set to otherwise.

    Segments that can grow are put together from pieces, which UCX opens neither to network cards nor to other
    processes: transfers would fail, or go through the host.
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
