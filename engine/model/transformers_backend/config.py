"""A checkpoint's shape, found by running transformers' code for it on a model without weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from engine.contract.errors import CheckpointError
from engine.model.model_config import read_config_json, read_cpu_dtype, read_dtype
from engine.model.model_shape import ModelShape
from engine.model.transformers_backend import experts
from engine.model.transformers_backend.probe import IMPLEMENTATION, AttentionCall, Probe, probe
from engine.model.transformers_backend.refusals import check_config, check_raw_config


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig(ModelShape):
    """The shape of a model that transformers computes.

    inner_size: the width of its widest linear layer, the head aside. version: transformers' version.
    """

    inner_size: int
    trust_remote_code: bool
    version: str

    @property
    def mlp_size(self) -> int:
        """See ``ModelShape``: estimated as two results of the widest linear layer."""
        return 2 * self.inner_size


def read_config(path: Path, *, trust_remote_code: bool) -> TransformersConfig:
    """The shape of a checkpoint, found by one pass through its model on the ``meta`` device.

    Raises:
        CheckpointError: Transformers does not know it, or paged attention cannot serve it; the message says why.
    """
    raw = read_config_json(path)
    check_raw_config(raw, trust_remote_code=trust_remote_code)
    model = build_on_meta(path, trust_remote_code=trust_remote_code)
    found = probe(model)
    check_layers(found, model.config)
    first = found.calls[0]
    return TransformersConfig(
        architecture=type(model).__name__,
        vocab_size=found.vocab_size,
        hidden_size=found.hidden_size,
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        max_model_len=model.config.max_position_embeddings,
        attention=tuple(call.spec for call in found.calls),
        dtype=read_dtype(raw),
        cpu_dtype=read_cpu_dtype(raw),
        inner_size=max(_widths(model)),
        trust_remote_code=trust_remote_code,
        version=transformers.__version__,
    )


def load_config(path: Path, *, trust_remote_code: bool) -> PreTrainedConfig:
    """config.json as parsed by transformers, and checked.

    Raises:
        CheckpointError: Not known to this version of transformers, or not supported.
    """
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # from a checkpoint's own code, or from fields that contradict each other
        raise CheckpointError(
            f"transformers {transformers.__version__} cannot read config.json: {_first_line(error)}"
        ) from error
    assert isinstance(config, PreTrainedConfig)
    check_config(config, path)
    if not isinstance(getattr(config, "max_position_embeddings", None), int):
        raise CheckpointError("config.json: max_position_embeddings is missing")
    return config


def build_on_meta(path: Path, *, trust_remote_code: bool) -> PreTrainedModel:
    """A checkpoint's model with the recording attention, on torch's ``meta`` device.

    Raises:
        CheckpointError: There is none for generating text, or it is not what config.json names, or is not supported.
    """
    config = copy.deepcopy(load_config(path, trust_remote_code=trust_remote_code))
    config._attn_implementation = IMPLEMENTATION
    config._experts_implementation = experts.IMPLEMENTATION
    try:
        with torch.device("meta"):
            factory: Any = AutoModelForCausalLM
            model = factory.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise CheckpointError(
            f"transformers {transformers.__version__} cannot build a model for text generation from it: "
            f"{_first_line(error)}"
        ) from error
    assert isinstance(model, PreTrainedModel)
    model.train(False)
    check_model(model)
    return model


def check_model(model: PreTrainedModel) -> None:
    """Refuse models that are not a stack of attention layers with a head.

    Raises:
        CheckpointError: Names the class, and what it is.
    """
    name, named = type(model).__name__, list(getattr(model.config, "architectures", None) or ())
    if named and name not in named and not any(map(_is_unknown_generator, named)):
        raise CheckpointError(f"config.json: architecture {', '.join(named)} generates no text; {name} would")
    convolutions = [module for module in model.modules() if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))]
    if model._is_stateful or convolutions:
        raise CheckpointError(f"{name} has layers with a state (state spaces or convolutions); this is not supported")
    if model.base_model is model:
        raise CheckpointError(f"{name} cannot be separated from its head; this is not supported")


def _is_unknown_generator(name: str) -> bool:
    """True for an architecture that, by its name, generates text but is unknown to transformers. Then ``model_type``
    says what it is: ERNIE 4.5's own code, for example, calls the class Ernie4_5_ForCausalLM.
    """
    return name.endswith(("ForCausalLM", "LMHeadModel")) and name not in dir(transformers)


def check_layers(found: Probe, config: PreTrainedConfig) -> None:
    """Refuse models whose layers do not all cache keys and values of the same shape.

    Raises:
        CheckpointError: A layer has no attention, or heads of other sizes than others.
    """
    if len(found.calls) != config.num_hidden_layers:
        raise CheckpointError(
            f"{len(found.calls)} of its {config.num_hidden_layers} layers use transformers' attention interface; the "
            "others are not supported"
        )
    if len({_heads(call) for call in found.calls}) > 1:
        raise CheckpointError("its layers have heads of different numbers or sizes; this is not supported")


def _heads(call: AttentionCall) -> tuple[int, int, int]:
    return call.num_heads, call.num_kv_heads, call.head_dim


def _widths(model: PreTrainedModel) -> Iterator[int]:
    yield model.config.hidden_size
    for module in model.base_model.modules():
        if isinstance(module, nn.Linear):
            yield module.out_features


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
