"""The most likely token of every row of logits."""

from __future__ import annotations

import torch

from engine.kernels import row_argmax as kernel
from engine.kernels.call import KernelCall


class MostLikely:
    """The first of the highest logits of each row, and whether the row holds a NaN. Used from one thread.

    For logits of ``dtype`` on the CPU it is compiled at once, for others when they come.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._calls: dict[torch.dtype, KernelCall] = {}
        if dtype is not None:
            self._call_for(dtype)

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits: [num_rows, vocab_size] to ([num_rows] int32, [num_rows] bool); of a row with a NaN, any token."""
        if logits.device.type != "cpu" or not logits.is_contiguous():
            maxima, token_ids = logits.max(dim=1)
            return token_ids.to(torch.int32), maxima.isnan()
        token_ids = torch.empty(len(logits), dtype=torch.int32)
        has_nan = torch.empty(len(logits), dtype=torch.bool)
        call = self._call_for(logits.dtype)
        parameters = call.parameters
        parameters[kernel.LOGITS] = logits.data_ptr()
        parameters[kernel.TOKEN_IDS], parameters[kernel.HAS_NAN] = token_ids.data_ptr(), has_nan.data_ptr()
        parameters[kernel.NUM_ROWS], parameters[kernel.SIZE] = logits.shape
        call.run_over(logits.numel())
        return token_ids, has_nan

    def _call_for(self, dtype: torch.dtype) -> KernelCall:
        if dtype not in self._calls:
            address = kernel.compiled_argmax(str(dtype).removeprefix("torch."))
            self._calls[dtype] = KernelCall(address, kernel.NUM_PARAMETERS)
        return self._calls[dtype]
