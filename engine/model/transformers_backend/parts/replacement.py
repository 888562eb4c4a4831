"""Replaces the parts of a model that compute the same as our layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.layers.attention_layer import AttentionLayer
from engine.layers.layer_spec import NormKind
from engine.layers.rotary import RotationTable
from engine.model.transformers_backend.attention import CurrentStep
from engine.model.transformers_backend.linears import Groups, pack_linears
from engine.model.transformers_backend.parts.attention_search import find_attention
from engine.model.transformers_backend.parts.attentions import OwnAttention
from engine.model.transformers_backend.parts.chain import Chain, ChainParts, find_chain
from engine.model.transformers_backend.parts.layers import LayerParts, OwnLayer, find_layer
from engine.model.transformers_backend.parts.mlps import OwnMLP, find_mlp
from engine.model.transformers_backend.parts.norms import OwnNorm, find_norm
from engine.model.transformers_backend.parts.rotations import NoRotations, Tables
from engine.model.transformers_backend.parts.trial import Trial
from engine.model.transformers_backend.parts.watch import Call, Watched, watch
from engine.model.transformers_backend.probe import Probe
from engine.model.transformers_backend.weights import leave_files

logger = logging.getLogger(f"baton.{__name__}")

Part = Callable[[], nn.Module]
"""Builds the replacement of a module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """names: of the replaced modules. products: groups of the linear layers that stayed.
    tables: of rotations, from which each step's rotations are looked up. chain: runs the layers without the model's own
    code, if all of them are ours.
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
    """Replace all possible parts of a loaded model, and pack the linear layers that stay; then it holds no files.

    layers: for each attention module of ``found``. products: groups of linear layers that can be computed together.
    """
    try:
        ours = _search(model, found, layers, step, max_positions)
    except Exception as error:  # a model's own code may do anything with samples
        logger.warning("no part of the model is replaced by Baton's own code, which can be faster: %s", error)
        ours = _Ours()
    names = frozenset(ours.inner)
    left = tuple(group for group in products if not _is_inside(group[0], names))
    while ours.inner:  # one at a time, since each entry holds the weights of the module that it replaces
        name, part = ours.inner.popitem()
        _put(model, name, part())
        del part
    pack_linears(model, left)
    leave_files(model)
    if ours.tables is None:
        return Replaced(names=names, products=left, tables=(), chain=None)
    trial = Trial(model, step, ours.tables, num_groups=1 + max(layer.group for layer in layers))
    build = partial(OwnLayer, dtype=model.dtype, device=model.device)
    own_layers = {own.name: build(model.get_submodule(own.name), own) for own in ours.layers}
    if not _put_if_it_runs(model, own_layers, trial):
        own_layers = {}
    chain = None
    if ours.chain is not None and own_layers:
        chain = Chain(model, ours.chain)
        chain = chain if trial.says_the_same(chain) else None
    if chain is None and names.issuperset(call.module for call in found.calls):
        _put_if_it_runs(model, {name: NoRotations() for name in ours.tables.sources}, trial)
    logger.info(
        "Baton's own code computes %d of %d layers, which is faster and gives the same results",
        len(own_layers),
        len(layers),
    )
    return Replaced(names=names | own_layers.keys(), products=left, tables=ours.tables.made, chain=chain)


@dataclass(slots=True, kw_only=True)
class _Ours:
    """The search's result. inner: the replacements of modules, by name. tables: None if the search failed."""

    inner: dict[str, Part] = field(default_factory=dict)
    layers: Sequence[LayerParts] = ()
    chain: ChainParts | None = None
    tables: Tables | None = None


def _search(
    model: PreTrainedModel, found: Probe, layers: Sequence[AttentionLayer], step: CurrentStep, max_positions: int
) -> _Ours:
    watched = watch(model, max_positions=max_positions)
    tables = Tables(model, watched, max_positions)
    attentions: dict[str, Part] = {}
    for layer, attention in zip(layers, found.calls, strict=True):
        call = watched.call(attention.module)
        parts = None if call is None else find_attention(model, call, tables)
        if parts is not None and _is_computed_once(model, attention.module, found):
            attentions[attention.module] = partial(OwnAttention, parts, layer, step)
    own_layers = [own for name in attentions if (own := find_layer(model, watched, name)) is not None]
    is_chain = len(own_layers) == len(layers) and len({own.delta_scale for own in own_layers}) == 1
    return _Ours(
        inner=attentions | _find_others(model, found, watched, outside=attentions),
        layers=own_layers,
        chain=find_chain(model, watched, [own.name for own in own_layers]) if is_chain else None,
        tables=tables,
    )


def _find_others(model: PreTrainedModel, found: Probe, watched: Watched, *, outside: Container[str]) -> dict[str, Part]:
    """Norms and MLPs that we can compute, outside of modules that are replaced as a whole."""
    parts: dict[str, Part] = {}
    calls: dict[str, list[Call]] = {}
    for call in watched.calls:
        calls.setdefault(call.module, []).append(call)
    for name, module in model.named_modules():
        dtypes = {weight.dtype for weight in module.parameters()} | {_only_dtype(call) for call in calls.get(name, ())}
        if dtypes != {model.dtype} or name not in calls or _is_inside(name, outside):
            continue
        if not _is_computed_once(model, name, found):
            continue
        norm, mlp = find_norm(module), find_mlp(module)
        if norm is not None and norm.spec.kind is NormKind.RMS:  # a layer norm is a single operator already
            parts[name] = partial(OwnNorm, norm)
        elif mlp is not None:
            parts[name] = partial(OwnMLP, mlp)
    return parts


def _only_dtype(call: Call) -> torch.dtype | None:
    """The dtype of a module's input, if a single tensor is all that it was called with."""
    return call.given.dtype if call.num_arguments == 1 and call.given is not None else None


def _put_if_it_runs(model: PreTrainedModel, modules: Mapping[str, nn.Module], trial: Trial) -> bool:
    """Replace modules; if the model's code then fails, undo it and return False."""
    before = {name: model.get_submodule(name) for name in modules}
    for name, module in modules.items():
        _put(model, name, module)
    if trial.hidden() is not None:
        return True
    for name, module in before.items():
        _put(model, name, module)
    return False


def _is_inside(name: str, modules: Container[str]) -> bool:
    parents = accumulate(name.split(".")[:-1], "{}.{}".format)
    return any(parent in modules for parent in parents)


def _is_computed_once(model: nn.Module, name: str, found: Probe) -> bool:
    """Whether each linear layer in a module is called once a pass, like our product in its place."""
    linears = (inner for inner, module in model.get_submodule(name).named_modules() if type(module) is nn.Linear)
    return all(f"{name}.{inner}" in found.linear_inputs for inner in linears)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)
