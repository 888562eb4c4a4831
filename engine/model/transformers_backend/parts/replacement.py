"""Puts our layers in the places of those parts of a model that compute the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.layers.attention_layer import AttentionLayer
from engine.layers.layer_spec import NormKind
from engine.layers.rotary import Rotations, RotationTable
from engine.model.transformers_backend.attention import CurrentStep
from engine.model.transformers_backend.linears import Groups, pack_linears
from engine.model.transformers_backend.parts.agreement import NUM_ROWS
from engine.model.transformers_backend.parts.attention_search import find_attention
from engine.model.transformers_backend.parts.attentions import OwnAttention
from engine.model.transformers_backend.parts.chain import Chain, find_chain
from engine.model.transformers_backend.parts.layers import OwnLayer, find_layer
from engine.model.transformers_backend.parts.mlps import OwnMLP, find_mlp
from engine.model.transformers_backend.parts.norms import OwnNorm, find_norm
from engine.model.transformers_backend.parts.rotations import NoRotations, Tables
from engine.model.transformers_backend.parts.watch import watch
from engine.model.transformers_backend.probe import Probe

logger = logging.getLogger(f"baton.{__name__}")

Part = Callable[[], nn.Module]
"""Makes what takes the place of a module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """names: of the modules in whose places ours are. products: linear layers that stayed, by which are computed
    together. tables: of rotations; a step's positions are looked up there. chain: instead of the model's own code
    around its layers, where these are all ours.
    """

    names: frozenset[str]
    products: Groups
    tables: tuple[RotationTable, ...]
    chain: Chain | None


@torch.no_grad()
def replace_parts(
    model: PreTrainedModel,
    found: Probe,
    layers: Sequence[AttentionLayer],
    step: CurrentStep,
    *,
    products: Groups,
    max_positions: int,
) -> Replaced:
    """Replace what can be in a loaded model, and pack the linear layers that stay.

    layers: what the attention modules of ``found`` mean. products: the linear layers by which can be computed together.
    """
    watched = watch(model, max_positions=max_positions)
    tables = Tables(model, watched, max_positions)
    attentions: dict[str, Part] = {}
    for layer, attention in zip(layers, found.calls, strict=True):
        call = watched.call(attention.module)
        parts = None if call is None else find_attention(model, call, tables)
        if parts is not None and _is_computed_once(model, attention.module, found):
            attentions[attention.module] = partial(OwnAttention, parts, layer, step)
    own_layers = [own for name in attentions if (own := find_layer(model, watched, name)) is not None]
    is_all_ours = len(own_layers) == len(layers)
    chain = find_chain(model, watched, [own.name for own in own_layers]) if is_all_ours else None
    inner = attentions | _find_others(model, found, outside=attentions)
    for name, part in inner.items():
        _put(model, name, part())
    left = tuple(names for names in products if not _is_inside(names[0], inner))
    pack_linears(model, left)
    if len(attentions) == len(layers) and not is_all_ours:
        _leave_out(model, tables, step, num_groups=1 + max(layer.group for layer in layers))
    for own in own_layers:
        _put(model, own.name, OwnLayer(model.get_submodule(own.name), own))
    logger.info("own code computes %d of %d layers, which is faster and says the same", len(own_layers), len(layers))
    return Replaced(
        names=frozenset(inner) | {own.name for own in own_layers},
        products=left,
        tables=tables.made,
        chain=None if chain is None else Chain(model, chain),
    )


def _find_others(model: PreTrainedModel, found: Probe, *, outside: Mapping[str, Part]) -> dict[str, Part]:
    """Norms and MLPs that we have, outside of what is replaced anyway."""
    parts: dict[str, Part] = {}
    for name, module in model.named_modules():
        is_ours = all(weight.dtype == model.dtype for weight in module.parameters())
        if not is_ours or _is_inside(name, outside) or not _is_computed_once(model, name, found):
            continue
        norm, mlp = find_norm(module), find_mlp(module)
        if norm is not None and norm.spec.kind is NormKind.RMS:  # the other kind is one operator as it is
            parts[name] = partial(OwnNorm, norm)
        elif mlp is not None:
            parts[name] = partial(OwnMLP, mlp)
    return parts


def _is_inside(name: str, modules: Mapping[str, Part]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def _is_computed_once(model: nn.Module, name: str, found: Probe) -> bool:
    """Is every linear layer of a module called once for each token, as is our product that takes its place?"""
    linears = (inner for inner, module in model.get_submodule(name).named_modules() if type(module) is nn.Linear)
    return all(f"{name}.{inner}" in found.linear_inputs for inner in linears)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)


def _leave_out(model: PreTrainedModel, tables: Tables, step: CurrentStep, *, num_groups: int) -> None:
    """Have the model make no rotations any more, unless its code reads them."""
    makers = {name: model.get_submodule(name) for name in tables.sources}
    for name in makers:
        _put(model, name, NoRotations())
    positions = torch.arange(NUM_ROWS, device=model.device)
    step.plans, step.rotations = (
        (_NoAttention(),) * num_groups,
        {made: made.rotations(positions) for made in tables.made},
    )
    try:
        model.base_model(input_ids=positions.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
    except Exception:  # whatever a model's code does with them
        for name, maker in makers.items():
            _put(model, name, maker)


class _NoAttention:
    """A plan that attends to nothing."""

    def attend(
        self, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """See ``AttentionPlan``; no layer of a model whose attention modules are all ours calls it."""
        raise NotImplementedError

    def attend_heads(self, layer: AttentionLayer, heads: torch.Tensor, rotations: Rotations) -> torch.Tensor:  # noqa: ARG002  (the Protocol's)
        """See ``AttentionPlan``."""
        return heads.new_zeros(len(heads), layer.transform.num_heads * heads.shape[2])
