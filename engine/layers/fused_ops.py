"""What lies between matrix products and attention, as generated kernels: for GPUs, where each operator is a launch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from engine.contract.config import Switch
from engine.contract.errors import ConfigError
from engine.layers.layer_spec import Activation, FusedSpec, NormSpec
from engine.layers.rotary import rotate_halves

logger = logging.getLogger(f"baton.{__name__}")

Function = Callable[..., torch.Tensor]
Compile = Callable[[Function], Function]
"""A function to one that does the same by generated kernels."""


def activate_plain(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """An activation, element by element."""
    if activation is Activation.SILU:
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation is Activation.GELU_TANH else "none")


def activate_halves(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """activation(gate) * up of [num_tokens, 2 * size], the gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activate_plain(gate, activation) * up


def root_mean_square_norm(x: torch.Tensor, weight: torch.Tensor, spec: NormSpec) -> torch.Tensor:
    """The last dimension by its root mean square, then by a weight; an offset is added in float32."""
    if spec.offset == 0:
        return F.rms_norm(x, (x.shape[-1],), weight, spec.eps)
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float() + spec.offset, spec.eps).to(x.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedOps:
    """Sequences of operators that see one token at a time, each one function so that it can become one kernel.

    add_norm: (hidden, delta, weight) adds ``delta`` to ``hidden`` in place and returns the sum normalised.
    rotate: (heads, cosine, sine), ``rotate_halves``. gate: (gate_up), ``activate_halves``.
    """

    add_norm: Function
    rotate: Function
    gate: Function


def generate(function: Function, *, backend: str | Callable[..., Any] = "inductor") -> Function:
    """By torch.compile, once for all numbers of tokens but 1, which it always treats apart.

    ``dynamic`` makes every size one that may change: kernels a little slower than for sizes that are known, but
    nothing is compiled while requests wait.
    """
    return torch.compile(function, dynamic=True, fullgraph=True, backend=backend)


def choose_fused_ops(
    asked: Switch, device: torch.device, dtype: torch.dtype, *, spec: FusedSpec, compile_: Compile = generate
) -> FusedOps | None:
    """Generated kernels where they are wanted and can be had; None, with one warning that says why, where they cannot.

    Raises:
        ConfigError: They are required, and cannot be had.
    """
    if asked is False or (device.type == "cpu" and asked == "auto"):
        return None
    if device.type == "cpu":
        raise ConfigError(f"gpu.compile_elementwise is true, but the device is {device}; set it to auto or false")
    try:
        return compile_fused_ops(device, dtype, spec=spec, compile_=compile_)
    except Exception as error:  # no Triton, no compiler, no headers, too old a GPU: each has errors of its own
        reason = str(error).partition("\n")[0] or type(error).__name__
        if asked is True:
            raise ConfigError(f"gpu.compile_elementwise is true, but nothing can be compiled: {reason}") from error
        logger.warning("elementwise operators are not compiled, which is slower: %s", reason)
        return None


@torch.inference_mode()
def compile_fused_ops(
    device: torch.device, dtype: torch.dtype, *, spec: FusedSpec, compile_: Compile = generate
) -> FusedOps:
    """Fused operators that have run once for several tokens and once for one, so that they are compiled."""

    def add_norm(hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        hidden.add_(delta, alpha=spec.residual_scale)
        return root_mean_square_norm(hidden, weight, spec.norm)

    def gate(gate_up: torch.Tensor) -> torch.Tensor:
        return activate_halves(gate_up, spec.activation)

    fused_ops = FusedOps(add_norm=compile_(add_norm), rotate=compile_(rotate_halves), gate=compile_(gate))
    ones = partial(torch.ones, dtype=dtype, device=device)
    # Sizes that differ from each other: those that are equal would be taken for one and the same.
    for num_tokens in (8, 1):
        fused_ops.add_norm(ones(num_tokens, 64), ones(num_tokens, 64), ones(64))
        cosine_sine = ones(num_tokens, 2, 16)  # parts of rows, as ``RotaryEmbedding`` hands them out
        cosine, sine = cosine_sine[:, 0, None, :], cosine_sine[:, 1, None, :]
        fused_ops.rotate(ones(num_tokens, 6, 32)[:, :4], cosine, sine)  # part of the fused projection
        fused_ops.rotate(ones(num_tokens, 4, 32), cosine, sine)  # after a norm
        fused_ops.gate(ones(num_tokens, 64))
    return fused_ops
