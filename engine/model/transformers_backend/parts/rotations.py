"""Turns the rotations that a model's own code computes from positions into tables for our attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from engine.layers.rotary import Rotations, RotationTable
from engine.model.transformers_backend.parts.watch import Call, Watched

CHUNK: Final = 4096
"""Positions of a table that are computed at once."""


class Angles(NamedTuple):
    """Cosine and sine of a pass's tokens, [1, num_tokens, size] each; the second half of the size repeats the first."""

    cosine: torch.Tensor
    sine: torch.Tensor

    def rotations(self) -> Rotations:
        """The angles as rotations for our own layers."""
        table = torch.stack([part[0, :, : part.shape[2] // 2] for part in self], dim=1)
        return RotationTable(table).rotations(torch.arange(len(table), device=table.device))


class NoRotations(nn.Module):
    """Replaces a module that computes rotations, when nothing uses them any more."""

    def forward(self, *_: Any, **__: Any) -> None:
        """Returns None for any arguments."""


def angles_of(call: Call) -> Angles | None:
    """The angles among the arguments of a call, if there are any."""
    values = (*call.args, *call.kwargs.values())
    return next((Angles(*value) for value in values if isinstance(value, tuple) and _is_angles(value)), None)


def _is_angles(pair: tuple[Any, ...]) -> bool:
    """Whether a pair holds cosine and sine for each token, with second halves that repeat the first."""
    if [getattr(part, "ndim", None) for part in pair] != [3, 3] or pair[0].shape != pair[1].shape:
        return False
    halves = [part.tensor_split(2, dim=2) for part in pair if part.is_floating_point() and len(part) == 1]
    return len(halves) == len(pair) and all(torch.equal(first, second) for first, second in halves)


class Tables:
    """The rotation tables of a model. The module that computes the model's angles computes each table, once.

    sources: the names of these modules. made: the tables.
    """

    def __init__(self, model: nn.Module, watched: Watched, max_positions: int) -> None:
        self.sources: set[str] = set()
        self._model, self._watched, self._max_positions = model, watched, max_positions
        self._made: list[tuple[torch.Tensor | None, RotationTable]] = []

    @property
    def positions(self) -> torch.Tensor:
        """The positions of the watched pass."""
        return self._watched.positions

    @property
    def made(self) -> tuple[RotationTable, ...]:
        """All tables made so far."""
        return tuple(table for _, table in self._made)

    def table(self, angles: Angles | None, *, like: torch.Tensor) -> RotationTable | None:
        """The table with these angles at the watched positions; for None, the empty table of layers without rotation.
        None if no module computes the angles from positions alone. ``like``: gives the model's dtype and device.
        """
        wanted = None if angles is None else angles.cosine
        for made_for, made in self._made:
            if made_for is wanted:
                return made
        if angles is None:
            table = RotationTable(torch.empty(self._max_positions, 2, 0, dtype=like.dtype, device=like.device))
        else:
            source = next((call for call in self._watched.calls if _returned(call, angles)), None)
            if source is None:
                return None
            try:
                rows = torch.cat([torch.stack(pair, dim=1) for pair in self._chunks(source)])
            except Exception:  # a model's code may do anything with other positions
                return None
            watched = self._watched.positions
            if len(rows) != self._max_positions or not torch.equal(rows[watched], angles.rotations().table):
                return None
            self.sources.add(source.module)
            table = RotationTable(rows.to(like.dtype).contiguous())  # some models rotate in float32; ours never do
        self._made.append((wanted, table))
        return table

    def _chunks(self, source: Call) -> Iterator[list[torch.Tensor]]:
        """Cosine and sine, [number of positions, num_pairs] each, chunk by chunk."""
        module, watched = self._model.get_submodule(source.module), self._watched.positions
        for first in range(0, self._max_positions, CHUNK):
            chunk = torch.arange(first, min(first + CHUNK, self._max_positions), device=watched.device).unsqueeze(0)

            def in_chunk(value: Any, chunk: torch.Tensor = chunk) -> Any:
                is_positions = isinstance(value, torch.Tensor) and value.dtype == watched.dtype
                if not is_positions or value.shape[-1:] != watched.shape or not bool((value == watched).all()):
                    return value
                return chunk.expand(*value.shape[:-1], -1)

            args, kwargs = pytree.tree_map(in_chunk, (source.args, source.kwargs))
            yield [part[0, :, : part.shape[2] // 2] for part in module(*args, **kwargs)]


def _returned(call: Call, angles: Angles) -> bool:
    return isinstance(call.output, tuple) and call.output[0] is angles.cosine
