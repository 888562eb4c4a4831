"""How a part of a layer, attention or an MLP, is joined to the residual stream."""

from __future__ import annotations

import torch

from engine.layers.norm import Norm


class ResidualNorms:
    """The norms around one part of a layer: of what it reads, and of what it adds. Either may be None.

    delta_scale: what everything is multiplied with before it is added to the residual stream; also that of ``before``.
    """

    def __init__(self, *, before: Norm | None, after: Norm | None, delta_scale: float) -> None:
        self.before, self.after = before, after
        self._delta_scale = delta_scale

    def enter(self, hidden: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """Add ``delta``, what the part before made, to the residual stream ``hidden`` in place; both [num_tokens,
        hidden_size]. Returns what this part reads, not to be written to.
        """
        if self.before is not None:
            return self.before.add_and_normalize(hidden, delta)
        if delta is not None:
            hidden.add_(delta, alpha=self._delta_scale)
        return hidden

    def leave(self, result: torch.Tensor) -> torch.Tensor:
        """What this part adds to the residual stream."""
        return result if self.after is None else self.after.add_and_normalize(result, None)
