"""The most likely token of every row of logits."""

from __future__ import annotations

import torch

from engine.kernels import row_argmax as kernel
from engine.kernels.call import KernelCall
from engine.step import IntArray


class MostLikely:
    """The first of the highest logits of each row, and whether the row holds a NaN. Used from one thread.

    For logits of ``dtype`` on the CPU it is compiled at once, for others when they come.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._calls: dict[torch.dtype, KernelCall] = {}
        self._token_ids = torch.empty(0, dtype=torch.int32)
        self._has_nan = torch.empty(0, dtype=torch.bool)
        self._as_array: IntArray = self._token_ids.numpy()
        if dtype is not None:
            self._call_for(dtype)

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits: [num_rows, vocab_size] to ([num_rows] int32, [num_rows] bool); of a row with a NaN, any token."""
        if logits.device.type != "cpu" or not logits.is_contiguous():
            maxima, token_ids = logits.max(dim=1)
            return token_ids.to(torch.int32), maxima.isnan()
        self._search(logits)
        return self._token_ids[: len(logits)].clone(), self._has_nan[: len(logits)].clone()

    def on_host(self, logits: torch.Tensor) -> IntArray | None:
        """The same for logits on the CPU, as an array; None where a row holds a NaN, or they are elsewhere."""
        if logits.device.type != "cpu" or not logits.is_contiguous() or self._search(logits):
            return None
        return self._as_array[: len(logits)].copy()

    def _search(self, logits: torch.Tensor) -> bool:
        """Fill the first of ``_token_ids`` and ``_has_nan``; True when a row holds a NaN."""
        num_rows, size = logits.shape
        if num_rows > len(self._token_ids):
            self._token_ids = torch.empty(num_rows, dtype=torch.int32)
            self._has_nan = torch.empty(num_rows, dtype=torch.bool)
            self._as_array = self._token_ids.numpy()
        call = self._call_for(logits.dtype)
        parameters = call.parameters
        parameters[kernel.LOGITS] = logits.data_ptr()
        parameters[kernel.TOKEN_IDS], parameters[kernel.HAS_NAN] = self._token_ids.data_ptr(), self._has_nan.data_ptr()
        parameters[kernel.NUM_ROWS], parameters[kernel.SIZE] = num_rows, size
        parameters[kernel.ANY_NAN] = 0
        call.run_over(num_rows * size)
        return parameters[kernel.ANY_NAN] != 0

    def _call_for(self, dtype: torch.dtype) -> KernelCall:
        if dtype not in self._calls:
            address = kernel.compiled_argmax(str(dtype).removeprefix("torch."))
            self._calls[dtype] = KernelCall(address, kernel.NUM_PARAMETERS)
        return self._calls[dtype]
