"""What a model is told of one step beside the tokens themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from engine.attention.backend import AttentionPlans


class StepContext(NamedTuple):
    """Everything that layers may need to know of a step; passed through ``forward`` as one argument.

    What a further feature needs to know in every layer (which adapter a row uses, what an encoder produced) becomes a
    member here, and layers that do not use it stay as they are.

    positions: [num_tokens] where each token stands in its sequence, int64, on the model's device.
    plans: how attention reaches the keys and values of the step, one plan for each KV cache group.
    between_layers: to be called before each layer of a long step, where somebody wants to be.
    """

    positions: torch.Tensor
    plans: AttentionPlans
    between_layers: Callable[[], None] | None = None
