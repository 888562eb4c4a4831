"""What is watched, and where results lie, while a step's kernel calls are recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

LINE_BYTES: Final = 64

_ALLOCATIONS: Final = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    }
)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not say what subclassing takes
    """Has new tensors lie in a ``StepMemory``, and notes what torch computes: from then on they get memory of their
    own, since nothing is known of how long such a model needs them.

    others: names of all operators but those that allocate or make views.
    """

    def __init__(self, memory: StepMemory) -> None:
        assert not torch.is_inference_mode_enabled(), "in it, operators that may copy arrive as views"
        super().__init__()  # type: ignore[no-untyped-call]
        self.others: set[str] = set()
        self._is_on = True
        self._memory = memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch does not wrap ``__torch_dispatch__`` to keep its compiler out. The wrapper would load that
        compiler at the first call: 900 modules, more than a second within somebody's request.
        """
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._is_on:
            return result
        if func not in _ALLOCATIONS:
            if not _is_view(func):
                self.others.add(str(func))
            return result
        taken = None if self.others else self._memory.take(result)
        if taken is None:
            self.others.add(str(func))
            return result
        return taken

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens meanwhile does not count."""
        self._is_on = False
        try:
            yield
        finally:
            self._is_on = True


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    is_view = bool(returns) and all(value.alias_info and not value.alias_info.is_write for value in returns)
    return is_view and func is not torch.ops.aten.lift_fresh.default  # which makes a tensor of Python's numbers


class StepMemory:
    """Memory for what steps compute, the same for each: only one runs at a time, and none needs another's results.

    What is taken in a step's first part lasts for the whole step. What another part takes lasts until the part after
    the next one begins: the same few lines of the caches serve all layers. With ``max_rows``, tensors have room for so
    many rows, however many they are taken with.

    sizes: bytes of memory to begin with, for first, odd and even parts. None: tensors keep their own memory for now, to
        see what a step needs (``peaks``).
    """

    def __init__(self, max_rows: int | None = None, *, sizes: Sequence[int] | None) -> None:
        self._max_rows, self._num_rows = max_rows, 0
        self.rehearses = sizes is None
        self._regions = [torch.empty(size, dtype=torch.uint8) for size in sizes or [0] * 3]
        self._ends = [0, 0, 0]
        self.peaks = [0, 0, 0]
        self._num_parts = 0
        self.lent: list[torch.Tensor] = []

    def rewind(self, num_rows: int) -> None:
        """Begin a step of ``num_rows`` rows. ``lent`` are the pieces of memory that it takes tensors from."""
        self._num_rows = num_rows
        self._ends, self._num_parts, self.lent = [0, 0, 0], 0, list(self._regions)

    def next_part(self) -> None:
        """Begin the next part of the step."""
        self._num_parts += 1
        self._ends[self._region] = 0

    @property
    def _region(self) -> int:
        return 1 + self._num_parts % 2 if self._num_parts else 0

    def take(self, like: torch.Tensor) -> torch.Tensor | None:
        """A tensor of the same shape, dtype and strides; None if it should have room for more rows and has no rows."""
        index, num_bytes = self._region, like.untyped_storage().nbytes()
        if self._max_rows is not None:
            if not like.dim() or like.shape[0] != self._num_rows:
                return None
            num_bytes = num_bytes // self._num_rows * self._max_rows
        num_bytes = -(-num_bytes // LINE_BYTES) * LINE_BYTES
        self.peaks[index] = max(self.peaks[index], self._ends[index] + num_bytes)
        if self.rehearses:
            self._ends[index] += num_bytes
            return like
        if self._ends[index] + num_bytes > len(self._regions[index]):
            size = 2 * max(len(self._regions[index]), num_bytes)
            self._regions[index], self._ends[index] = torch.empty(size, dtype=torch.uint8), 0
            self.lent.append(self._regions[index])
        start = self._ends[index]
        self._ends[index] = start + num_bytes
        memory = self._regions[index][start : start + num_bytes].view(like.dtype)
        return memory.as_strided(like.shape, like.stride())
