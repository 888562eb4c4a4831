"""Runs a model of transformers in an engine: tokens of many requests at once, over the paged cache."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.contract.errors import CheckpointError
from engine.contract.step import IntArray
from engine.layers.attention_layer import AttentionLayer, HeadTransform
from engine.model.step_context import StepContext
from engine.model.transformers_backend import attention, experts
from engine.model.transformers_backend.attention import PAGED_LAYER, CurrentStep, PagedLayer
from engine.model.transformers_backend.config import TransformersConfig, build_on_meta
from engine.model.transformers_backend.head import Head, find_product
from engine.model.transformers_backend.linears import Groups, apart, pack_linears, siblings
from engine.model.transformers_backend.parts.agreement import sample_rows
from engine.model.transformers_backend.parts.replacement import Replaced, replace_parts
from engine.model.transformers_backend.probe import AttentionCall, Probe, probe
from engine.model.transformers_backend.weights import load_weights
from engine.model.weights.checkpoint import ProgressCallback


class TransformersModel:
    """Turns token ids and a paged cache into hidden states and logits.

    The model's code sees the tokens of a step as one sequence, in which they have their own positions. Only our
    attention knows which request each token belongs to. ``replaced``: the parts that our layers compute.
    """

    def __init__(self, head: Head, step: CurrentStep, replaced: Replaced) -> None:
        self.replaced = replaced
        self._head, self._step = head, step

    @torch.no_grad()
    def forward(self, input_ids: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Token ids, [num_tokens], to hidden states after the last norm."""
        step, positions = self._step, context.positions
        step.plans, step.between_layers = context.plans, context.between_layers
        step.rotations = {table: table.rotations(positions) for table in self.replaced.tables}
        if self.replaced.chain is not None:
            return self.replaced.chain(input_ids)
        output = self._head.layers(
            input_ids=input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits over the vocabulary, [num_rows, vocab_size], for rows of ``forward``'s result."""
        return self._head(hidden)

    def best_tokens(self, hidden: torch.Tensor) -> IntArray | None:
        """See ``LoadedModel``."""
        return self._head.best_tokens(hidden)


def load_model(
    path: Path,
    config: TransformersConfig,
    *,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    progress: ProgressCallback | None = None,
) -> TransformersModel:
    """Load a checkpoint, and put our attention, products, experts and layers into its model.

    Raises:
        CheckpointError: The weights do not fit, or the model changed since ``config`` was read.
    """
    shadow = build_on_meta(path, trust_remote_code=config.trust_remote_code)
    found = probe(shadow)
    products = _choose_products(shadow, found)
    own_config = copy.deepcopy(shadow.config)
    own_config._attn_implementation = attention.IMPLEMENTATION
    own_config._experts_implementation = experts.IMPLEMENTATION
    model = load_weights(path, type(shadow), own_config, dtype=dtype, progress=progress)
    nn.Module.to(model, device)
    experts.pack_all_experts(model)
    layers = [_attention_layer(model, config, call, index) for index, call in enumerate(found.calls)]
    step = CurrentStep()
    for call, layer in zip(found.calls, layers, strict=True):
        setattr(model.get_submodule(call.module), PAGED_LAYER, PagedLayer(step, layer))
    head_product = find_product(model, found.output_class, sample_rows(found.hidden_size, device).to(dtype))
    replaced = replace_parts(model, found, layers, step, products=products, max_positions=max_positions)
    return TransformersModel(Head(model, found.output_class, product=head_product), step, replaced)


def _choose_products(shadow: PreTrainedModel, found: Probe) -> Groups:
    """Which linear layers become packed products. Tries groups of siblings first, then single layers; takes the first
    choice with which the model's code still runs, else none.
    """
    together = siblings(found.linear_inputs)
    for groups in (together, apart(together)):
        trial = copy.deepcopy(shadow)
        pack_linears(trial, groups)
        try:
            probe(trial)
        except CheckpointError:
            continue
        return groups
    return ()


def _attention_layer(
    model: PreTrainedModel, config: TransformersConfig, call: AttentionCall, index: int
) -> AttentionLayer:
    group, place = next(
        (number, group.layers.index(index))
        for number, group in enumerate(config.kv_cache_groups)
        if index in group.layers
    )
    transform = HeadTransform(num_heads=call.num_heads, num_kv_heads=call.num_kv_heads, query_norm=None, key_norm=None)
    sinks = None if call.sinks is None else model.get_parameter(call.sinks).data.float()
    return AttentionLayer(group=group, index=place, spec=config.attention[index], transform=transform, sinks=sinks)
