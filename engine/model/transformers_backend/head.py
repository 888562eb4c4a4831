"""Runs a model's head, its own code after the layers, on hidden states that were computed before."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.contract.errors import CheckpointError
from engine.contract.step import IntArray
from engine.model.transformers_backend.linears import PackedLinear


class Head:
    """Turns hidden states into logits with a model whose layers were removed. The model may scale or cap logits.

    output_class: the type that its layers return. ``layers`` holds the removed layers. product: the name of the linear
        layer that is the whole head (``find_product``), if there is one.
    """

    def __init__(self, model: PreTrainedModel, output_class: type[Any], *, product: str | None = None) -> None:
        self.layers: Any = model.base_model
        self._product: Any = None if product is None else model.get_submodule(product)
        self._model: Any = model
        self._given = _GivenHidden(output_class)
        setattr(model, model.base_model_prefix, self._given)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] to [num_rows, vocab_size]."""
        logits: torch.Tensor
        if self._product is not None:
            logits = self._product(hidden)
            return logits
        self._given.hidden = hidden.unsqueeze(0)
        logits = self._model(inputs_embeds=self._given.hidden, use_cache=False).logits[0]
        return logits

    def best_tokens(self, hidden: torch.Tensor) -> IntArray | None:
        """See ``LoadedModel``; None also if the head is more than a product, or its product cannot be searched."""
        return self._product.best_columns(hidden) if isinstance(self._product, PackedLinear) else None

    def give_back(self) -> None:
        """Put the layers back into the model."""
        setattr(self._model, self._model.base_model_prefix, self.layers)


class _GivenHidden(nn.Module):
    """Replaces a model's layers, and returns given hidden states."""

    def __init__(self, output_class: type[Any]) -> None:
        super().__init__()
        self._output_class = output_class
        self.hidden: torch.Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._output_class(last_hidden_state=self.hidden)


@torch.no_grad()
def find_product(model: PreTrainedModel, output_class: type[Any], rows: torch.Tensor) -> str | None:
    """The linear layer whose results equal the loaded model's logits bit for bit; None if the model does more. rows:
    [num_rows, hidden_size] hidden states to compare them with.
    """
    linear = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    name = next((name for name, module in model.named_modules() if module is linear), None)
    if name is None or type(linear) is not nn.Linear or linear.in_features != rows.shape[1]:
        return None
    if linear.weight.dtype != rows.dtype:
        return None
    head = Head(model, output_class)
    try:
        theirs, ours = head(rows), linear(rows)
        return name if theirs.dtype == ours.dtype and torch.equal(theirs, ours) else None
    finally:
        head.give_back()


def probe_head(model: PreTrainedModel, output: Any) -> int:
    """The size of the vocabulary of the logits of a model on ``meta``. ``output``: what its layers returned.

    Raises:
        CheckpointError: Its layers cannot be taken out.
    """
    head = Head(model, type(output))
    try:
        return head(output.last_hidden_state[0]).shape[-1]
    except AttributeError as error:
        raise CheckpointError(
            f"{type(model).__name__} cannot be separated from its head ({error}); this is not supported"
        ) from error
    finally:
        head.give_back()
