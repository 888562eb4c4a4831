"""Finds which earlier tokens a token sees, from a model's mask functions and without building masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from engine.contract.errors import CheckpointError

MaskFunction = Callable[[Any, Any, Any, Any], torch.Tensor]
"""Whether the query of a batch entry and head, at one position, sees the key at another position."""


@dataclass(frozen=True, slots=True)
class SeenWindow:
    """Replaces a mask: a token sees itself and the tokens before it, ``size`` in all, or all of them (None).

    It is not a tensor, so code that changes or reads a mask fails on it.
    """

    size: int | None


def window_of(mask_function: MaskFunction, config: PreTrainedConfig) -> SeenWindow:
    """The window that a mask amounts to, found by calling its function for some positions.

    Raises:
        CheckpointError: It lets tokens see anything other than themselves and a number of tokens before.
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
    """[position + 2] which keys a position sees, up to the key that follows it."""
    with torch.device("cpu"):  # real numbers are needed here, while the pass around it runs on ``meta``
        zero = torch.tensor(0)
        seen = mask_function(zero, zero, torch.tensor(position), torch.arange(position + 2))
    return seen.expand(position + 2)
