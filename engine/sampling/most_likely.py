"""The most likely token of every row of logits, among all tokens or among those that a mask allows."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from engine.contract.step import IntArray
from engine.kernels import row_argmax as kernel
from engine.kernels.call import KernelCall, threads_for
from engine.kernels.row_argmax import ANY_NAN, LOGITS


class MaskedTokens(NamedTuple):
    """Results for rows with masks, all [num_rows]. If ``is_open``, the token is undefined: the caller chooses it."""

    token_ids: torch.Tensor
    has_nan: torch.Tensor
    is_open: torch.Tensor


class MostLikely:
    """Finds the first of the highest logits of each row, and whether the row holds a NaN. Used from one thread."""

    def __init__(self) -> None:
        self._searches: dict[torch.dtype, HostSearch] = {}

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits: [num_rows, vocab_size] to ([num_rows] int32, [num_rows] bool); a row with a NaN gets any token."""
        if not _is_on_host(logits):
            maxima, token_ids = logits.max(dim=1)
            return token_ids.to(torch.int32), maxima.isnan()
        return self.on_host(logits.dtype).search(logits)

    def allowed(self, logits: torch.Tensor, places: IntArray, words: IntArray) -> MaskedTokens:
        """The first of the highest logits of each row among those that its mask allows.

        Args:
            logits: [num_rows, vocab_size].
            places: [num_rows] int32, index of the row's mask; -1 for none.
            words: [num_masks, num_words] int32, the bits of allowed tokens, token 0 in the lowest bit of the first
                word; tokens behind the last word are not allowed.

        Returns:
            A row is open if it holds a NaN, or if no allowed logit is finite and clearly above minus infinity.
            If logits are not contiguous on the CPU, all rows with a mask are open.
        """
        if _is_on_host(logits):
            return self.on_host(logits.dtype).allowed(logits, places, words)
        token_ids, has_nan = self(logits)
        return MaskedTokens(token_ids, has_nan, torch.from_numpy(places >= 0))

    def on_host(self, dtype: torch.dtype) -> HostSearch:
        """The compiled searches for contiguous logits of ``dtype`` on the CPU."""
        if dtype not in self._searches:
            self._searches[dtype] = HostSearch(dtype)
        return self._searches[dtype]


class HostSearch:
    """The compiled searches through contiguous CPU logits of one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        name = str(dtype).removeprefix("torch.")
        self._call = KernelCall(partial(kernel.compiled_argmax, name), kernel.NUM_PARAMETERS)
        self._masked_call = KernelCall(partial(kernel.compiled_masked_argmax, name), kernel.NUM_MASKED_PARAMETERS)
        self._parameters = self._call.parameters
        self._shape, self._max_threads = torch.Size((0, 0)), 1
        self._make_room(1)

    def search(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``MostLikely``."""
        self._run(logits)
        num_rows = self._shape[0]
        return self._token_ids[:num_rows].clone(), self._has_nan[:num_rows].clone()

    def token_ids(self, logits: torch.Tensor) -> IntArray | None:
        """The tokens as an array; None if a row holds a NaN, or if the logits are not contiguous or have another dtype.

        A model may return logits of another dtype than its own, or a slice of wider rows.
        """
        if logits.dtype is not self._dtype or not logits.is_contiguous():
            return None
        return None if self._run(logits) else self._found[: self._shape[0]].copy()

    def _run(self, logits: torch.Tensor) -> bool:
        """Search; returns whether any row holds a NaN."""
        parameters, shape = self._parameters, logits.shape
        if shape != self._shape:
            self._set_shape(shape)
        parameters[LOGITS] = logits.data_ptr()
        self._call.run(max_threads=self._max_threads)
        if not parameters[ANY_NAN]:
            return False
        parameters[ANY_NAN] = 0
        return True

    def _set_shape(self, shape: torch.Size) -> None:
        self._parameters[kernel.NUM_ROWS], self._parameters[kernel.SIZE] = shape
        if shape[0] > len(self._found):
            self._make_room(shape[0])
        self._shape, self._max_threads = shape, threads_for(shape.numel())

    def allowed(self, logits: torch.Tensor, places: IntArray, words: IntArray) -> MaskedTokens:
        """See ``MostLikely``."""
        num_rows, size = logits.shape
        found = MaskedTokens(
            token_ids=torch.empty(num_rows, dtype=torch.int32),
            has_nan=torch.empty(num_rows, dtype=torch.bool),
            is_open=torch.empty(num_rows, dtype=torch.bool),
        )
        parameters = self._masked_call.parameters
        parameters[kernel.LOGITS] = logits.data_ptr()
        parameters[kernel.NUM_ROWS], parameters[kernel.SIZE] = num_rows, size
        parameters[kernel.PLACES], parameters[kernel.WORDS] = places.ctypes.data, words.ctypes.data
        parameters[kernel.NUM_MASKS], parameters[kernel.NUM_WORDS] = words.shape
        for field, tensor in zip((kernel.TOKEN_IDS, kernel.HAS_NAN, kernel.IS_OPEN), found, strict=True):
            parameters[field] = tensor.data_ptr()
        self._masked_call.run_over(num_rows * size)
        return found

    def _make_room(self, num_rows: int) -> None:
        self._token_ids = torch.empty(num_rows, dtype=torch.int32)
        self._has_nan = torch.empty(num_rows, dtype=torch.bool)
        self._found: IntArray = self._token_ids.numpy()
        self._parameters[kernel.TOKEN_IDS] = self._token_ids.data_ptr()
        self._parameters[kernel.HAS_NAN] = self._has_nan.data_ptr()


def _is_on_host(logits: torch.Tensor) -> bool:
    return logits.device.type == "cpu" and logits.is_contiguous()
