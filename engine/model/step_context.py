"""What a model needs to know of a step, besides the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from engine.attention.backend import AttentionPlans


class StepContext(NamedTuple):
    """Everything that layers may need to know of a step, passed through ``forward`` as one argument.

    A feature that every layer must know about (the adapter of a row, an encoder's output) becomes a new member here;
    layers that do not use it stay unchanged.

    positions: [num_tokens] position of each token in its sequence, int64, on the model's device.
    plans: how attention reaches the step's keys and values, one plan for each KV cache group.
    between_layers: called once for each layer, before its attention, if set.
    """

    positions: torch.Tensor
    plans: AttentionPlans
    between_layers: Callable[[], None] | None = None


Forward = Callable[[torch.Tensor, StepContext], torch.Tensor]
"""Maps token ids to hidden states: ``Decoder.forward``."""
