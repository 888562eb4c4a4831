"""Records the operators of torch work, so that two runs can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class GraphTrace(TorchDispatchMode):
    """While it is entered, records every operator with its arguments.

    A tensor that the work did not make itself is written down by its address: a graph would go on reading there. One
    that it did make is written down by what made it, numbers by their value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Any] = []
        self._makers: dict[int, int] = {}
        self._made: list[torch.Tensor] = []
        self._is_paused = False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and record it."""
        if self._is_paused:
            return func(*args, **(kwargs or {}))
        described = tree_map(self._describe, (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self._note(str(func), described, (args, kwargs), result)
        return result

    @contextmanager
    def opaque(self, name: str, *arguments: object) -> Iterator[Callable[[torch.Tensor], None]]:
        """Record everything inside the block as one operator. The operator's result is passed to the function that is
        yielded.
        """
        described = tree_map(self._describe, arguments)
        self._is_paused = True
        try:
            yield lambda result: self._note(name, described, arguments, result)
        finally:
            self._is_paused = False

    def _note(self, name: str, described: object, arguments: object, result: object) -> None:
        self.steps.append((name, described))
        given = {_address(tensor) for tensor in _tensors(arguments)}
        for tensor in _tensors(result):
            if (address := _address(tensor)) not in given:  # else a view, or what was written to
                self._makers[address] = len(self.steps)
                self._made.append(tensor)  # keeps its memory from being used again, which would mix up the addresses

    def _describe(self, value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return repr(value)
        address = _address(value)
        place = ("made", self._makers[address]) if address in self._makers else ("kept", address)
        if value.is_mkldnn:
            return place
        return (*place, tuple(value.shape), value.stride(), value.storage_offset(), str(value.dtype))


def _tensors(values: object) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()
