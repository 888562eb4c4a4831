"""Replaces a model's linear layers by packed products, and those with the same input by a single product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import nn

from engine.contract.step import IntArray
from engine.layers.packed_weight import Multiply, best_columns, pack

Groups = tuple[tuple[str, ...], ...]
"""Groups of names of linear layers that are computed together."""

MIN_FUSED: Final = 2


class PackedLinear(nn.Module):
    """A linear layer whose matrix is stored in the matrix library's own layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._multiply = pack(linear.weight.data, None if linear.bias is None else linear.bias.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        return _over_rows(self._multiply, x)

    def best_columns(self, x: torch.Tensor) -> IntArray | None:
        """See ``packed_weight.best_columns``; x: [num_rows, in_size]."""
        return best_columns(self._multiply, x)


class SharedProduct:
    """One product for several projections of one input, computed at the first call of any of them.

    The other projections take their parts if they are called with the same tensor; with another tensor they are
    computed anew.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._sizes = [linear.out_features for linear in linears]
        self._multiply = pack_joined(linears)
        self._input: torch.Tensor | None = None
        self._parts: list[torch.Tensor | None] = []

    def part(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """One projection, [..., its size]: columns of the shared result."""
        if x is not self._input or self._parts[index] is None:
            self._parts = list(torch.split(_over_rows(self._multiply, x), self._sizes, dim=-1))
            self._input = x
        part = self._parts[index]
        assert part is not None
        self._parts[index] = None
        if all(other is None for other in self._parts):
            self._input = None  # do not hold it longer than needed
        return part


class PartOfProduct(nn.Module):
    """One of the projections of a ``SharedProduct``."""

    def __init__(self, linear: nn.Linear, product: SharedProduct, index: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._product, self._index = product, index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        return self._product.part(x, self._index)


def siblings(linear_inputs: Mapping[str, int]) -> Groups:
    """Groups of layers that can be one product: in one module, with one input tensor (``Probe.linear_inputs``)."""
    groups: dict[tuple[str, int], list[str]] = {}
    for name, tensor in linear_inputs.items():
        groups.setdefault((name.rpartition(".")[0], tensor), []).append(name)
    return tuple(tuple(names) for names in groups.values())


def apart(groups: Groups) -> Groups:
    """The same layers, each in a group of its own."""
    return tuple((name,) for names in groups for name in names)


def pack_linears(model: nn.Module, groups: Groups) -> None:
    """Replace the layers of ``groups`` by packed products; their weights are not readable afterwards."""
    for names in groups:
        linears = [model.get_submodule(name) for name in names]
        assert all(isinstance(linear, nn.Linear) for linear in linears)
        product = SharedProduct(linears) if len(names) >= MIN_FUSED else None  # type: ignore[arg-type]
        for index, (name, linear) in enumerate(zip(names, linears, strict=True)):
            assert isinstance(linear, nn.Linear)
            packed = PackedLinear(linear) if product is None else PartOfProduct(linear, product, index)
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, packed)


def pack_joined(linears: Sequence[nn.Linear]) -> Multiply:
    """One product with the matrices of several layers: [num_tokens, in_features] to their results side by side."""
    weight = torch.cat([linear.weight.data for linear in linears]) if len(linears) > 1 else linears[0].weight.data
    return pack(weight, _joint_bias(linears))


def _joint_bias(linears: Sequence[nn.Linear]) -> torch.Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    zeros = (linear.weight.new_zeros(linear.out_features) for linear in linears)
    return torch.cat(
        [zero if linear.bias is None else linear.bias.data for linear, zero in zip(linears, zeros, strict=True)]
    )


def _over_rows(multiply: Multiply, x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return multiply(rows).view(*x.shape[:-1], -1)
