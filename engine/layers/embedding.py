"""Token embedding and the head that turns hidden states into logits; they may share one matrix."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional as F

from engine.contract.step import IntArray
from engine.kernels import row_copies as kernel
from engine.kernels.call import KernelCall
from engine.layers.packed_weight import Multiply, best_columns, can_find_best, pack


class Embedding:
    """The token embedding: ``weight`` [vocab_size, hidden_size]. Looked-up vectors are multiplied with ``scale``,
    rounded to the model's dtype.
    """

    def __init__(self, weight: torch.Tensor, *, scale: float = 1.0) -> None:
        self.weight = weight.contiguous()
        self._scale = float(torch.tensor(scale, dtype=weight.dtype))
        self._call: KernelCall | None = None
        if weight.device.type == "cpu":
            self._call = KernelCall(
                partial(kernel.compiled_embedding, str(weight.dtype).removeprefix("torch.")),
                kernel.NUM_EMBEDDING_PARAMETERS,
                numbers_at=kernel.NUMBERS,
                num_numbers=kernel.NUM_EMBEDDING_NUMBERS,
                rows_at=kernel.NUM_TOKENS,
            )
            self._call.numbers[kernel.SCALE] = self._scale
            parameters = self._call.parameters
            parameters[kernel.TABLE] = self.weight.data_ptr()
            parameters[kernel.VOCAB_SIZE], parameters[kernel.EMBEDDED_SIZE] = weight.shape

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Look up the vectors of [num_tokens] ids."""
        if self._call is not None:
            assert token_ids.dtype is torch.int64
            assert token_ids.is_contiguous()
            output = torch.empty(len(token_ids), self.weight.shape[1], dtype=self.weight.dtype)
            parameters = self._call.parameters
            parameters[kernel.TOKEN_IDS], parameters[kernel.EMBEDDED] = token_ids.data_ptr(), output.data_ptr()
            parameters[kernel.NUM_TOKENS] = len(token_ids)
            self._call.run_over(output.numel())
            return output
        vectors = F.embedding(token_ids, self.weight)
        return vectors if self._scale == 1.0 else vectors.mul_(self._scale)


class LMHead:
    """Computes logits over the vocabulary. ``tied``: uses the embedding's matrix.

    scale: factor of the logits. softcap: scaled logits ``s`` then become ``softcap * tanh(s / softcap)``.
    """

    def __init__(self, embedding: Embedding, *, tied: bool, scale: float = 1.0, softcap: float | None = None) -> None:
        self._scale, self._softcap = scale, softcap
        self._weight = embedding.weight if tied else torch.empty_like(embedding.weight)
        self._tied = tied
        self._multiply: Multiply | None = None

    def targets(self) -> dict[str, torch.Tensor]:
        """Where the head's own matrix is loaded; empty if it has none."""
        return {} if self._tied else {"lm_head.weight": self._weight}

    def pack(self) -> None:
        """Let the matrix library repack the matrix."""
        self._multiply = pack(self._weight, None)
        self._weight = self._weight.new_empty(0)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Multiply: [num_rows, hidden_size] to [num_rows, vocab_size]."""
        assert self._multiply is not None, "pack() comes after loading"
        logits = self._multiply(hidden)
        if self._scale != 1.0:
            logits = logits.mul_(self._scale)
        if self._softcap is not None:
            logits = logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits

    @property
    def finds_best(self) -> bool:
        """True if ``best_tokens`` can tell. Scaled or capped logits are rounded again, which may make two equal."""
        return can_find_best(self._multiply) and self._scale == 1.0 and self._softcap is None

    def best_tokens(self, hidden: torch.Tensor) -> IntArray | None:
        """The token of the highest logit of each row, the first of equal ones, [num_rows], without writing logits.

        Returns:
            None if a logit is NaN, or if this head cannot tell (``finds_best``).
        """
        assert self._multiply is not None
        return best_columns(self._multiply, hidden) if self.finds_best else None
