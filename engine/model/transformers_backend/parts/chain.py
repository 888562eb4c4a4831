"""Runs a model whose layers are all ours from token ids to hidden states, without its own code between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.layers.embedding import Embedding
from engine.layers.norm import Norm
from engine.model.transformers_backend.parts.layers import OwnLayer
from engine.model.transformers_backend.parts.norms import FoundNorm, find_norm
from engine.model.transformers_backend.parts.watch import Watched


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainParts:
    """The names of the embedding and of the layers, in order, and the norm after them."""

    embedding: str
    layers: Sequence[str]
    norm: FoundNorm


class Chain:
    """Runs the layers of a model without its own code between them."""

    def __init__(self, model: PreTrainedModel, parts: ChainParts) -> None:
        theirs = model.get_submodule(parts.embedding)
        self._embedding: Callable[[torch.Tensor], torch.Tensor] = theirs
        if type(theirs) is nn.Embedding and theirs.max_norm is None:  # a subclass may scale
            self._embedding = Embedding(theirs.weight.data)
        layers = [model.get_submodule(name) for name in parts.layers]
        self._layers = [layer for layer in layers if isinstance(layer, OwnLayer)]
        assert len(self._layers) == len(layers)
        self._norm: Norm = parts.norm.build(delta_scale=self._layers[-1].delta_scale)

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token ids, [num_tokens], to hidden states after the last norm."""
        hidden = self._embedding(input_ids)
        delta: torch.Tensor | None = None
        for layer in self._layers:
            delta = layer.advance(hidden, delta)
        return self._norm.add_and_normalize(hidden, delta)


def find_chain(model: PreTrainedModel, watched: Watched, layers: Sequence[str]) -> ChainParts | None:
    """The parts of a chain, if all layers are ours and pass on exactly what they return: the first layer gets the
    embedding's result, each other one the result of the layer before, and the last norm returns the model's result.
    """
    calls = [call for call in map(watched.call, layers) if call is not None]
    if len(calls) != len(layers) or any(first.result is not then.given for first, then in pairwise(calls)):
        return None
    first = calls[0].given
    if first is None or first.dtype != model.dtype:
        return None
    embeddings = [call.module for call in watched.calls if call.result is first]
    lasts = [call.module for call in watched.calls if call.given is calls[-1].result and call.result is watched.hidden]
    if len(embeddings) != 1 or len(lasts) != 1 or not isinstance(model.get_submodule(embeddings[0]), nn.Embedding):
        return None
    norm = find_norm(model.get_submodule(lasts[0]))
    return (
        None
        if norm is None or norm.weight.dtype != model.dtype
        else ChainParts(embedding=embeddings[0], layers=layers, norm=norm)
    )
