"""What the masks of a model say, found without building any: which earlier tokens a token sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from engine.contract.errors import CheckpointError

MaskFunction = Callable[[Any, Any, Any, Any], torch.Tensor]
"""Does a query of a batch and a head, at a position, see the key of a position?"""


@dataclass(frozen=True, slots=True)
class SeenWindow:
    """Stands where a mask would be: a token sees itself and those before it, ``size`` in all, or all (None).

    It has nothing of a tensor: code that changes or reads a mask fails on it.
    """

    size: int | None


def window_of(mask_function: MaskFunction, config: PreTrainedConfig) -> SeenWindow:
    """The window that a mask amounts to, found by asking it about positions.

    Raises:
        CheckpointError: It lets tokens see something else than themselves and so many before.
    """
    longest = config.max_position_embeddings - 1
    num_seen = int(_seen(mask_function, longest).sum())
    window = None if num_seen > longest else num_seen
    edges = (0, 1, 2, 63) if window is None else (0, 1, window - 1, window, window + 1, 3 * window + 1)
    for position in {min(edge, longest) for edge in (*edges, longest)}:
        keys = torch.arange(position + 2, device="cpu")
        first = 0 if window is None else position - window + 1
        if not torch.equal(_seen(mask_function, position), (keys >= first) & (keys <= position)):
            raise CheckpointError(
                "its layers attend by a mask that is neither causal nor a window, as that of chunks or of blocks of "
                "tokens that see each other; this is not supported"
            )
    return SeenWindow(window)


def _seen(mask_function: MaskFunction, position: int) -> torch.Tensor:
    """[position + 2] which keys a position sees, up to one that comes after it."""
    with torch.device("cpu"):  # inside of the pass without numbers, these are needed
        zero = torch.tensor(0)
        seen = mask_function(zero, zero, torch.tensor(position), torch.arange(position + 2))
    return seen.expand(position + 2)
