"""A test run of a model with parts of ours in it, before it serves."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from engine.layers.attention_layer import AttentionLayer
from engine.layers.rotary import Rotations
from engine.model.transformers_backend.attention import CurrentStep
from engine.model.transformers_backend.parts.rotations import Tables

ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""How much rounding at other places may change the result of all layers, relative to a row's largest number."""


class Trial:
    """Runs a model on a few tokens that do not see each other."""

    def __init__(self, model: PreTrainedModel, step: CurrentStep, tables: Tables, *, num_groups: int) -> None:
        self._model, self._step, self._tables = model, step, tables
        self._plans = (_NoAttention(),) * num_groups

    def hidden(self) -> torch.Tensor | None:
        """The model's hidden states before its head, [num_tokens, hidden_size]; None if its code fails."""
        ids, positions = self._begin()
        try:
            output = self._model.base_model(
                input_ids=ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
            )
        except Exception:  # a model's code may do anything with parts of ours
            return None
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def says_the_same(self, chain: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Whether the chain, without the model's own code, gives the same results as that code with our layers."""
        theirs = self.hidden()
        ids, _ = self._begin()
        if theirs is None:
            return False
        difference = (chain(ids) - theirs).abs().amax(dim=1)
        return bool((difference <= ROUNDING[theirs.dtype] * theirs.abs().amax(dim=1)).all())

    def _begin(self) -> tuple[torch.Tensor, torch.Tensor]:
        step, positions = self._step, self._tables.positions
        step.plans, step.between_layers = self._plans, None
        step.rotations = {made: made.rotations(positions) for made in self._tables.made}
        return torch.arange(len(positions), device=positions.device) % self._model.config.vocab_size, positions


class _NoAttention:
    """A plan in which tokens see nothing."""

    def attend(
        self,
        layer: AttentionLayer,  # noqa: ARG002  (the Protocol's)
        query: torch.Tensor,
        key: torch.Tensor,  # noqa: ARG002
        value: torch.Tensor,  # noqa: ARG002
    ) -> torch.Tensor:
        """See ``AttentionPlan``."""
        return torch.zeros_like(query).flatten(1)

    def attend_heads(self, layer: AttentionLayer, heads: torch.Tensor, rotations: Rotations) -> torch.Tensor:  # noqa: ARG002
        """See ``AttentionPlan``."""
        return heads.new_zeros(len(heads), layer.transform.num_heads * heads.shape[2])
