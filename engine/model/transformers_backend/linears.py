"""Linear layers of a model replaced by packed products, those of one input by a single one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import nn

from engine.layers.packed_weight import Multiply, pack

Groups = tuple[tuple[str, ...], ...]
"""Names of linear layers that are computed together."""

MIN_FUSED: Final = 2


class PackedLinear(nn.Module):
    """A linear layer whose matrix the matrix library keeps in its own layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._multiply = pack(linear.weight.data, None if linear.bias is None else linear.bias.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        return _over_rows(self._multiply, x)


class SharedProduct:
    """Several projections of one input as one product, which the first of them that is called computes.

    The others take their parts as long as they are called with the same tensor; with another one they compute anew.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._sizes = [linear.out_features for linear in linears]
        self._multiply = pack_joined(linears)
        self._input: torch.Tensor | None = None
        self._parts: list[torch.Tensor | None] = []

    def part(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """One projection, [..., its size]: columns of the common result."""
        if x is not self._input or self._parts[index] is None:
            self._parts = list(torch.split(_over_rows(self._multiply, x), self._sizes, dim=-1))
            self._input = x
        part = self._parts[index]
        assert part is not None
        self._parts[index] = None
        if all(other is None for other in self._parts):
            self._input = None  # nothing is held longer than it is needed
        return part


class PartOfProduct(nn.Module):
    """One of the layers of a ``SharedProduct``."""

    def __init__(self, linear: nn.Linear, product: SharedProduct, index: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._product, self._index = product, index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        return self._product.part(x, self._index)


def siblings(linear_inputs: Mapping[str, int]) -> Groups:
    """Layers by what can be one product: those of one module that get the same tensor (``Probe.linear_inputs``)."""
    groups: dict[tuple[str, int], list[str]] = {}
    for name, tensor in linear_inputs.items():
        groups.setdefault((name.rpartition(".")[0], tensor), []).append(name)
    return tuple(tuple(names) for names in groups.values())


def apart(groups: Groups) -> Groups:
    """The same layers, each a product of its own."""
    return tuple((name,) for names in groups for name in names)


def pack_linears(model: nn.Module, groups: Groups) -> None:
    """Put packed products in the places of the layers of ``groups``; their weights are not readable afterwards."""
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
    """One product by the matrices of several layers, [num_tokens, in_features] to their results side by side."""
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
