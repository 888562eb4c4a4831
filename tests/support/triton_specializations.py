"""Finds the arguments for which Triton would compile a kernel again, without a GPU: launches are recorded instead of
executed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

TARGET = GPUTarget("cuda", 90, 32)


class NotedKernel:
    """A fake kernel. ``seen`` has a key for each variant that a GPU would have to compile."""

    def __init__(self, kernel: JITFunction[Any]) -> None:
        self.seen: set[str] = set()
        self._bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(TARGET))

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """A launch over a grid."""

        def launch(*args: object, **kwargs: object) -> None:
            _, specialization, options = self._bind(*args, **kwargs, debug=False, instrumentation_mode="")
            self.seen.add(repr((specialization, options)))

        return launch


def note_launches(monkeypatch: pytest.MonkeyPatch, module: ModuleType, *names: str) -> list[NotedKernel]:
    """Replace a module's kernels by fakes."""
    kernels = [NotedKernel(getattr(module, name)) for name in names]
    for name, kernel in zip(names, kernels, strict=True):
        monkeypatch.setattr(module, name, kernel)
    return kernels
