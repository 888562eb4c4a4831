"""Token embedding and the head that turns hidden states into logits; they may share one matrix."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from engine.layers.packed_weight import Multiply, pack


class Embedding:
    """The token embedding: weight [vocab_size, hidden_size]. Looked-up vectors are multiplied with ``scale``, rounded
    to the model's dtype.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, scale: float = 1.0, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self._scale = float(torch.tensor(scale, dtype=dtype))

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Look up the vectors of [num_tokens] ids."""
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
