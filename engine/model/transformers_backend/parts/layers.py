"""Our replacement of decoder layers: attention, then a feed-forward part, each connected to the residual stream with
norms around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.layers.norm import ResidualNorms, ResidualSum
from engine.model.transformers_backend.parts.agreement import agree, call_in_float32, sample_rows
from engine.model.transformers_backend.parts.attentions import OwnAttention
from engine.model.transformers_backend.parts.mlps import OwnMLP
from engine.model.transformers_backend.parts.norms import FoundNorm, find_norm
from engine.model.transformers_backend.parts.watch import Call, Watched, hooked, watching_attention

NormsAround = tuple[FoundNorm | None, FoundNorm | None]
"""The norm of a part's input, and the norm of its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """What a layer consists of. name: in the model. attention, feed_forward: the names of its two parts within it.
    delta_scale: factor of their results in the residual stream. returns_tuple: its result is in a tuple.
    """

    name: str
    attention: str
    attention_norms: NormsAround
    feed_forward_norms: NormsAround
    feed_forward: str
    delta_scale: float
    returns_tuple: bool


class OwnLayer(nn.Module):
    """Replaces a decoder layer of a model and keeps the modules in it; its attention is ours already."""

    def __init__(self, layer: nn.Module, parts: LayerParts, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        attention, feed_forward = layer.get_submodule(parts.attention), layer.get_submodule(parts.feed_forward)
        assert isinstance(attention, OwnAttention)
        self.delta_scale = parts.delta_scale
        self.add = ResidualSum(parts.delta_scale, dtype=dtype, device=device)
        self._returns_tuple = parts.returns_tuple
        self._attention, self._feed_forward = attention, feed_forward
        self._attention_norms = self._around(*parts.attention_norms)
        self._feed_forward_norms = self._around(*parts.feed_forward_norms)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """[1, num_tokens, hidden_size] to the same shape; other arguments are ignored, since they add nothing."""
        hidden: torch.Tensor = (args[0] if args else kwargs["hidden_states"])[0].clone()
        hidden = self.add(hidden, self.advance(hidden, None)).unsqueeze(0)
        return (hidden,) if self._returns_tuple else hidden

    def advance(self, hidden: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """One layer over [num_tokens, hidden_size], like ``DecoderLayer.forward``: adds the previous layer's result and
        attention's to ``hidden`` in place, and returns what is still to be added.
        """
        attended = self._attention.attend(self._attention_norms.enter(hidden, delta))
        read = self._feed_forward_norms.enter(hidden, self._attention_norms.leave(attended))
        second = self._feed_forward
        made = second.rows(read) if isinstance(second, OwnMLP) else second(read.unsqueeze(0))[0]
        return self._feed_forward_norms.leave(made)

    def _around(self, before: FoundNorm | None, after: FoundNorm | None) -> ResidualNorms:
        return ResidualNorms(
            before=None if before is None else before.build(delta_scale=self.delta_scale),
            after=None if after is None else after.build(),
            add=self.add,
        )


def find_layer(model: PreTrainedModel, watched: Watched, attention: str) -> LayerParts | None:
    """The parts of the layer around an attention module that is ours; None if our layer cannot replace it."""
    name = attention.rpartition(".")[0]
    call = watched.call(name)
    if call is None or call.given is None or call.given.dtype != model.dtype:
        return None
    if isinstance(call.output, tuple) and len(call.output) != 1:
        return None
    layer, rows = model.get_submodule(name), sample_rows(call.given.shape[-1], call.given.device)
    inner = {child: module for child, module in layer.named_children() if watched.call(f"{name}.{child}") is not None}
    norms = {child: norm for child, module in inner.items() if (norm := find_norm(module)) is not None}
    attention_child = attention.rpartition(".")[2]
    others = [child for child, module in inner.items() if not isinstance(module, nn.Dropout)]
    others = [child for child in others if child not in norms and child != attention_child]
    second = watched.call(f"{name}.{others[0]}") if len(others) == 1 else None
    if second is None or second.num_arguments != 1 or not isinstance(second.output, torch.Tensor):
        return None
    if {second.output.dtype, *(norm.weight.dtype for norm in norms.values())} != {model.dtype}:
        return None
    passages = _pass_through(model, layer, call, rows, others[0])
    if passages is None or not {"", attention_child, others[0], *norms} <= passages.keys():
        return None
    flow = _Flow(
        attention=passages[attention_child],
        feed_forward=passages[others[0]],
        norms=[(norm, passages[child]) for child, norm in norms.items()],
    )
    for delta_scale in _scales(layer):
        norms_around = flow.norms_around(rows, passages[""].said, delta_scale)
        if norms_around is not None:
            return LayerParts(
                name=name,
                attention=attention_child,
                attention_norms=norms_around[0],
                feed_forward_norms=norms_around[1],
                feed_forward=others[0],
                delta_scale=delta_scale,
                returns_tuple=isinstance(call.output, tuple),
            )
    return None


class _Passage(NamedTuple):
    """A module's input and result, [num_tokens, hidden_size]."""

    read: torch.Tensor
    said: torch.Tensor


Found = tuple[FoundNorm | None]
"""One norm or none, in a tuple, since None alone means that nothing was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flow:
    """The inputs and results of a layer's modules in one pass."""

    attention: _Passage
    feed_forward: _Passage
    norms: Sequence[tuple[FoundNorm, _Passage]]

    def norms_around(
        self, start: torch.Tensor, end: torch.Tensor, delta_scale: float
    ) -> tuple[NormsAround, NormsAround] | None:
        """The norms around attention and around the feed-forward part, if a layer of ours with them gets from ``start``
        to ``end``; else None.
        """
        around: list[NormsAround] = []
        hidden = start
        for part in (self.attention, self.feed_forward):
            before, after = self._before(hidden, part.read), self._after(part.said)
            if before is None:
                return None
            hidden = hidden + delta_scale * (part.said if after is None else after[1].said)
            around.append((before[0], None if after is None else after[0]))
        num_used = sum(norm is not None for norms in around for norm in norms)
        return (around[0], around[1]) if num_used == len(self.norms) and agree(hidden, end) else None

    def _before(self, hidden: torch.Tensor, read: torch.Tensor) -> Found | None:
        """The norm that turns the residual stream into a part's input."""
        if agree(hidden, read):
            return (None,)
        found = (norm for norm, passage in self.norms if agree(hidden, passage.read) and agree(passage.said, read))
        norm = next(found, None)
        return None if norm is None else (norm,)

    def _after(self, said: torch.Tensor) -> tuple[FoundNorm, _Passage] | None:
        """The norm of a part's result, with its input and result."""
        return next(((norm, passage) for norm, passage in self.norms if agree(said, passage.read)), None)


def _pass_through(
    model: PreTrainedModel, layer: nn.Module, call: Call, rows: torch.Tensor, feed_forward: str
) -> dict[str, _Passage] | None:
    """Inputs and results, on samples, of a layer (named "") and of its modules. ``feed_forward`` is replaced by a
    module that returns other samples.
    """
    calls: list[Call] = []
    args, kwargs = call.with_given(rows.unsqueeze(0))
    own = getattr(layer, feed_forward)
    setattr(layer, feed_forward, _Says(rows.flip(1).unsqueeze(0)))
    try:
        with watching_attention(model), hooked({"": layer, **dict(layer.named_children())}, calls, copies=True):
            call_in_float32(layer, *args, **kwargs)
    except Exception:  # a model's code may do anything with samples
        return None
    finally:
        setattr(layer, feed_forward, own)
    return {
        inner.module: _Passage(inner.given[0], inner.result[0])
        for inner in calls
        if inner.given is not None and inner.result is not None
    }


class _Says(nn.Module):
    """Returns the same tensor for any input."""

    def __init__(self, said: torch.Tensor) -> None:
        super().__init__()
        self._said = said

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        return self._said


def _scales(layer: Any) -> Iterator[float]:
    """Factors that a layer may apply to its parts' results: 1 and its float attributes."""
    yield 1.0
    yield from (value for value in vars(layer).values() if isinstance(value, float))
