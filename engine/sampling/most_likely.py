"""The most likely token of every row of logits."""

from __future__ import annotations

import torch

from engine.contract.step import IntArray
from engine.kernels import row_argmax as kernel
from engine.kernels.call import KernelCall


class MostLikely:
    """The first of the highest logits of each row, and whether the row holds a NaN. Used from one thread."""

    def __init__(self) -> None:
        self._searches: dict[torch.dtype, HostSearch] = {}

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits: [num_rows, vocab_size] to ([num_rows] int32, [num_rows] bool); of a row with a NaN, any token."""
        if logits.device.type != "cpu" or not logits.is_contiguous():
            maxima, token_ids = logits.max(dim=1)
            return token_ids.to(torch.int32), maxima.isnan()
        return self.on_host(logits.dtype).search(logits)

    def on_host(self, dtype: torch.dtype) -> HostSearch:
        """What searches contiguous logits of ``dtype`` on the CPU."""
        if dtype not in self._searches:
            self._searches[dtype] = HostSearch(dtype)
        return self._searches[dtype]


class HostSearch:
    """The compiled search through contiguous logits of one dtype on the CPU."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._call = KernelCall(kernel.compiled_argmax(str(dtype).removeprefix("torch.")), kernel.NUM_PARAMETERS)
        self._parameters = self._call.parameters
        self._make_room(1)

    def search(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``MostLikely``."""
        self.token_ids(logits)
        return self._token_ids[: len(logits)].clone(), self._has_nan[: len(logits)].clone()

    def token_ids(self, logits: torch.Tensor) -> IntArray | None:
        """The tokens as an array; None where a row holds a NaN."""
        parameters = self._parameters
        num_rows, size = logits.shape
        if num_rows > len(self._found):
            self._make_room(num_rows)
        parameters[kernel.LOGITS], parameters[kernel.ANY_NAN] = logits.data_ptr(), 0
        parameters[kernel.NUM_ROWS], parameters[kernel.SIZE] = num_rows, size
        self._call.run_over(num_rows * size)
        return None if parameters[kernel.ANY_NAN] else self._found[:num_rows].copy()

    def _make_room(self, num_rows: int) -> None:
        self._token_ids = torch.empty(num_rows, dtype=torch.int32)
        self._has_nan = torch.empty(num_rows, dtype=torch.bool)
        self._found: IntArray = self._token_ids.numpy()
        self._parameters[kernel.TOKEN_IDS] = self._token_ids.data_ptr()
        self._parameters[kernel.HAS_NAN] = self._has_nan.data_ptr()
