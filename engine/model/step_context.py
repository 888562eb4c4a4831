"""What a model is told of one step beside the tokens themselves."""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.attention.backend import AttentionPlans


class StepContext(NamedTuple):
    """Everything that layers may need to know of a step; passed through ``forward`` as one argument.

    What a further feature needs to know in every layer (which adapter a row uses, what an encoder produced) becomes a
    member here, and layers that do not use it stay as they are.

    positions: [num_tokens] where each token stands in its sequence, int64, on the model's device.
    plans: how attention reaches the keys and values of the step, one plan for each KV cache group.
    """

    positions: torch.Tensor
    plans: AttentionPlans
