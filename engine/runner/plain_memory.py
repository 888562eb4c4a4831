"""Memory of a GPU that others can be let into: network cards, and processes beside this one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch

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
