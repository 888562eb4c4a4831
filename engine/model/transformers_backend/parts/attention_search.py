"""Finds out what an attention module consists of, from what it passes to attention and what it returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.layers.layer_spec import NormKind
from engine.layers.rotary import Rotations, rotate
from engine.model.transformers_backend.parts.agreement import agree, call_in_float32, in_float32, sample_rows
from engine.model.transformers_backend.parts.attentions import AttentionParts, Way
from engine.model.transformers_backend.parts.norms import FoundNorm, find_norm
from engine.model.transformers_backend.parts.rotations import Tables, angles_of
from engine.model.transformers_backend.parts.watch import Call, Heads, watching_attention

Projection = tuple[Sequence[nn.Linear], Sequence[torch.Tensor]]
"""Linear layers, and the queries, keys and values that they may yield side by side, [num_tokens, size] each."""


def find_attention(model: PreTrainedModel, call: Call, tables: Tables) -> AttentionParts | None:
    """The parts of an attention module; None if our attention cannot compute it. ``call``: how it was called."""
    given, output = call.given, call.output
    returns_pair = isinstance(output, tuple)
    if given is None or given.dtype != model.dtype or (returns_pair and output[1:] != (None,)):
        return None
    module, rows = model.get_submodule(call.module), sample_rows(given.shape[-1], given.device)
    seen = _call_with(model, module, call, rows)
    if seen is None:
        return None
    heads, output = seen
    linears = [child for child in module.children() if type(child) is nn.Linear]
    out = _find_out(linears, heads.attended.flatten(1), output[0] if returns_pair else output)
    norms = [norm for norm in map(find_norm, module.children()) if norm is not None and norm.spec.kind is NormKind.RMS]
    angles = angles_of(call)
    rotations = None if angles is None else angles.rotations()
    for into, (query, key, value) in _projections([linear for linear in linears if linear is not out], rows, heads):
        query_way = _find_way(query, heads.query, norms, rotations)
        key_way = _find_way(key, heads.key, norms, rotations)
        if out is None or query_way is None or key_way is None or not _are_alike(query_way, key_way):
            continue
        if not agree(value, heads.value.flatten(1)):
            continue
        table = tables.table(angles if query_way.is_rotated else None, like=given)
        if table is None:
            return None
        return AttentionParts(
            into=into, out=out, query_way=query_way, key_way=key_way, table=table, returns_pair=returns_pair
        )
    return None


def _call_with(model: PreTrainedModel, module: nn.Module, call: Call, rows: torch.Tensor) -> tuple[Heads, Any] | None:
    """What a module passes to attention and what it returns, with samples in place of its hidden states."""
    args, kwargs = call.with_given(rows.unsqueeze(0))
    with watching_attention(model) as seen:
        try:
            output = call_in_float32(module, *args, **kwargs)
        except Exception:  # a model's code may do anything with samples
            return None
        return seen[0], output


def _find_out(linears: Sequence[nn.Linear], attended: torch.Tensor, output: Any) -> nn.Linear | None:
    """The layer that turns attention's result, [num_tokens, num_heads * head_dim], into the module's."""
    for linear in linears:
        if linear.in_features == attended.shape[1] and agree(in_float32(linear, attended), output[0]):
            return linear
    return None


def _projections(linears: Sequence[nn.Linear], rows: torch.Tensor, heads: Heads) -> Iterator[Projection]:
    """Candidates: one layer with queries, keys and values as columns, or three layers in any order that sizes allow."""
    sizes = [part.shape[1] * part.shape[2] for part in (heads.query, heads.key, heads.value)]
    results = {linear: in_float32(linear, rows) for linear in linears if linear.in_features == rows.shape[1]}
    for linear, result in results.items():
        if linear.out_features == sum(sizes):
            yield [linear], torch.split(result, sizes, dim=1)
    for query in results:
        for key in results:
            for value in results:
                into = [query, key, value]
                if len(set(into)) == len(into) and [linear.out_features for linear in into] == sizes:
                    yield into, [results[linear] for linear in into]


def _find_way(
    projected: torch.Tensor, wanted: torch.Tensor, norms: Sequence[FoundNorm], rotations: Rotations | None
) -> Way | None:
    """How ``wanted``, [num_tokens, number of heads, head_dim], is computed from a projection."""
    head_dim = wanted.shape[2]
    ways = [Way()]
    ways += [Way(norm=norm, is_by_head=True) for norm in norms if len(norm.weight) == head_dim]
    ways += [Way(norm=norm) for norm in norms if len(norm.weight) == projected.shape[1]]
    for way in ways:
        result = projected
        if way.norm is not None:
            by_norm = projected.reshape(-1, len(way.norm.weight)).contiguous()
            result = way.norm.build(dtype=torch.float32).add_and_normalize(by_norm, None)
        result = result.reshape(wanted.shape)
        if agree(result, wanted):
            return way
        fits = rotations is not None and 2 * rotations.cosine.shape[2] <= head_dim
        if rotations is not None and fits and agree(rotate(result, rotations), wanted):
            return way._replace(is_rotated=True)
    return None


def _are_alike(query_way: Way, key_way: Way) -> bool:
    """Whether queries and keys go through the same steps, as the attention backend's pass requires."""
    norms = [way.norm for way in (query_way, key_way)]
    specs = [None if norm is None else norm.spec for norm in norms]
    return query_way._replace(norm=None) == key_way._replace(norm=None) and specs[0] == specs[1]
