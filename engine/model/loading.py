"""Loads a checkpoint's model: computed natively, or by its own code in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from engine.contract.config import Switch
from engine.contract.errors import ConfigError
from engine.contract.step import IntArray
from engine.layers.fused_ops import choose_fused_ops
from engine.model.decoder import decoder_class
from engine.model.model_config import ModelConfig
from engine.model.model_shape import ModelShape
from engine.model.step_context import StepContext
from engine.model.weights.checkpoint import ProgressCallback, has_tensor, load_weights


class LoadedModel(Protocol):
    """Turns token ids and a paged cache into hidden states and logits."""

    def forward(self, input_ids: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Run the layers: token ids, [num_tokens], to hidden states."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits over the vocabulary, [num_rows, vocab_size], for rows of ``forward``'s result."""

    def best_tokens(self, hidden: torch.Tensor) -> IntArray | None:
        """The token of the highest logit of each row, the first of equal ones, [num_rows], without making logits.

        Returns:
            None if a logit is NaN, or if this model cannot; then compute ``logits``.
        """


def load_model(
    path: Path,
    shape: ModelShape,
    *,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    compile_elementwise: Switch = False,
    progress: ProgressCallback | None = None,
) -> LoadedModel:
    """The model of a checkpoint, with its weights. ``shape`` comes from ``load_model_config``.

    Raises:
        CheckpointError: The weights do not fit.
        ConfigError: Fused kernels are required, and there are none for the device.
    """
    if isinstance(shape, ModelConfig):
        model = decoder_class(shape)(
            shape,
            max_positions=max_positions,
            dtype=dtype,
            device=device,
            has_own_head=has_tensor(path, "lm_head.weight"),
            fused_ops=choose_fused_ops(compile_elementwise, device, dtype, spec=shape.fused_spec),
        )
        load_weights(path, model.targets(), ignored=shape.ignored_tensors, progress=progress)
        model.finish_loading()
        return model
    if compile_elementwise is True:
        raise ConfigError(
            "gpu.compile_elementwise is true, but this model is computed by transformers' code: leave it out"
        )
    from engine.model.transformers_backend import config  # imported late: an optional dependency
    from engine.model.transformers_backend import model as backend

    assert isinstance(shape, config.TransformersConfig)
    return backend.load_model(path, shape, max_positions=max_positions, dtype=dtype, device=device, progress=progress)
