"""One pass through a model without weights, to learn from its own code how each layer attends.

The model lives on torch's ``meta`` device, where tensors have only shapes, so its weights take no memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from engine.contract.errors import CheckpointError
from engine.layers.attention_spec import AttentionSpec
from engine.model.transformers_backend.head import probe_head
from engine.model.transformers_backend.masks import SeenWindow, window_of

IMPLEMENTATION: Final = "baton_probe"
"""Name in transformers of the attention that records how it is called."""

NUM_TOKENS: Final = 7

UNDERSTOOD: Final = frozenset({"dropout", "scaling", "sliding_window", "softcap", "s_aux"})
"""Supported arguments of attention. The window is taken from the mask, as in transformers' own eager code."""

HARMLESS: Final = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "return_dict", "output_hidden_states"}
)
"""Arguments of a model's ``forward`` that it passes on to attention, where they have no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """How one layer calls attention. module, sinks: their names in the model."""

    module: str
    spec: AttentionSpec
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sinks: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What one pass through a model showed.

    calls: of attention, in order. linear_inputs: for each ``nn.Linear`` that was called once, by name, a number for its
        input tensor; equal numbers mean the same tensor. output_class: the type that the model without its head
        returns.
    """

    calls: tuple[AttentionCall, ...]
    linear_inputs: dict[str, int]
    output_class: type[Any]
    hidden_size: int
    vocab_size: int


@dataclass(slots=True)
class _Recorder:
    """Records what happens during one pass."""

    model: PreTrainedModel
    calls: list[AttentionCall] = field(default_factory=list)
    linear_calls: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def record_attention(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, others: Any
    ) -> None:
        name = _name_of(module, self.model.named_modules())
        _check_arguments(name, mask, others)
        _check_shapes(name, query, key, value)
        if name is None or any(call.module == name for call in self.calls):
            raise CheckpointError(f"its attention {name} is called several times for one token; this is not supported")
        head_dim, sinks = query.shape[3], others.get("s_aux")
        scale = others.get("scaling")
        self.calls.append(
            AttentionCall(
                module=name,
                spec=AttentionSpec(
                    scale=1 / math.sqrt(head_dim) if scale is None else float(scale),
                    rope=None,
                    window=mask.size,
                    softcap=others.get("softcap"),
                    has_sinks=sinks is not None,
                ),
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim=head_dim,
                sinks=None if sinks is None else _name_of(sinks, self.model.named_parameters()),
            )
        )

    def watch_linears(self) -> list[Any]:
        """Record the inputs of every linear layer; returns the handles that end it."""
        handles = []
        for name, module in self.model.named_modules():
            if type(module) is nn.Linear:
                calls = self.linear_calls.setdefault(name, [])
                handles.append(module.register_forward_pre_hook(lambda _, inputs, calls=calls: calls.append(inputs[0])))
        return handles


_recorders: list[_Recorder] = []
"""The pass being recorded, if any; global, because attention functions are looked up by name."""


def _record(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **others: Any
) -> tuple[torch.Tensor, None]:
    _recorders[-1].record_attention(module, query, key, value, attention_mask, others)
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def _record_mask(*, mask_function: Any, config: PreTrainedConfig, **_: Any) -> SeenWindow:
    return window_of(mask_function, config)


AttentionInterface.register(IMPLEMENTATION, _record)
AttentionMaskInterface.register(IMPLEMENTATION, _record_mask)


@torch.inference_mode()
def probe(model: PreTrainedModel) -> Probe:
    """Run a model on ``meta`` with the recording attention.

    Raises:
        CheckpointError: Its layers attend in a way that is not supported, or its code cannot be followed.
    """
    recorder = _Recorder(model)
    handles = recorder.watch_linears()
    _recorders.append(recorder)
    try:
        with torch.device("meta"):
            ids = torch.zeros(1, NUM_TOKENS, dtype=torch.int64)
            base = model.base_model(
                input_ids=ids,
                position_ids=torch.arange(NUM_TOKENS).unsqueeze(0),
                attention_mask=torch.ones(1, NUM_TOKENS),  # else it looks for sequence boundaries in positions
                use_cache=False,
            )
            vocab_size = probe_head(model, base)
    except CheckpointError:
        raise
    except Exception as error:  # a model's code may do anything with tensors that have no numbers
        raise CheckpointError(
            f"its code in transformers cannot be followed ({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error
    finally:
        _recorders.pop()
        for handle in handles:
            handle.remove()
    inputs = {name: calls[0] for name, calls in recorder.linear_calls.items() if len(calls) == 1}
    return Probe(
        calls=tuple(recorder.calls),
        linear_inputs={name: id(tensor) for name, tensor in inputs.items()},
        output_class=type(base),
        hidden_size=base.last_hidden_state.shape[-1],
        vocab_size=vocab_size,
    )


def _check_arguments(name: str | None, mask: Any, others: dict[str, Any]) -> None:
    if not isinstance(mask, SeenWindow):
        kind = "none" if mask is None else type(mask).__name__
        raise CheckpointError(f"its attention {name} uses a mask of its own ({kind}); this is not supported")
    if others.get("is_causal", True) is False:
        raise CheckpointError(f"its attention {name} sees tokens that come later; this is not supported")
    for argument, given in others.items():
        if given is not None and argument not in UNDERSTOOD | HARMLESS | {"is_causal"}:
            raise CheckpointError(f"its attention {name} asks for {argument}; this is not supported")


def _check_shapes(name: str | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    is_alike = key.shape == value.shape and query.shape[3] == key.shape[3]
    if not is_alike or query.shape[2] != NUM_TOKENS or key.shape[2] != NUM_TOKENS:
        raise CheckpointError(
            f"its attention {name} has queries {list(query.shape)}, keys {list(key.shape)} and values "
            f"{list(value.shape)}, which are not heads of one size; this is not supported"
        )


def _name_of(wanted: Any, named: Any) -> str | None:
    return next((name for name, found in named if found is wanted), None)
