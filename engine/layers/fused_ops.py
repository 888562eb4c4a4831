"""What lies between matrix products and attention: by operators, and, for GPUs, as fused kernels that can be chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch
from torch.nn import functional as F

from engine.contract.config import Switch
from engine.contract.errors import ConfigError
from engine.layers.layer_spec import Activation, FusedSpec, NormSpec
from engine.layers.rotary import Rotations

logger = logging.getLogger(f"baton.{__name__}")


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


class FusedOps(Protocol):
    """Sequences of operators that see one token at a time, each one kernel."""

    def add_norm(self, hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Add ``delta`` to ``hidden`` in place, and return the sum normalised: [num_tokens, size], in one piece."""

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``activate_halves`` of [num_tokens, 2 * size], in one piece."""

    def place_heads(
        self,
        heads: torch.Tensor,
        counts: tuple[int, int],
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        rotations: Rotations,
        cache: tuple[torch.Tensor, torch.Tensor],
        places: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Normalise queries and keys, if there are ``norms``, rotate them, and write keys and values to the cache.

        heads: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], the two numbers of which are ``counts``.
        norms: the weights of queries and of keys, [head_dim] each. cache: keys and values, each [num_blocks,
        block_size, num_kv_heads, head_dim]. places: blocks and offsets in them, each [num_tokens].

        Returns:
            The queries, [num_tokens, num_heads, head_dim].
        """


Build = Callable[[FusedSpec], FusedOps]


def build_triton_ops(spec: FusedSpec) -> FusedOps:
    """Those in Triton.

    Raises:
        ImportError: There is no Triton.
    """
    from engine.layers.triton_ops import TritonOps  # imported late: it needs Triton

    return TritonOps(spec)


@torch.inference_mode()
def choose_fused_ops(
    asked: Switch, device: torch.device, dtype: torch.dtype, *, spec: FusedSpec, build: Build = build_triton_ops
) -> FusedOps | None:
    """Fused operators where they are wanted and can be had; None, with one warning that says why, where they cannot.

    Raises:
        ConfigError: They are required, and cannot be had.
    """
    if asked is False or (device.type == "cpu" and asked == "auto"):
        return None
    if device.type == "cpu":
        raise ConfigError(f"gpu.compile_elementwise is true, but the device is {device}; set it to auto or false")
    try:
        fused_ops = build(spec)
        fused_ops.gate(torch.ones(1, 64, dtype=dtype, device=device))  # compiles it
    except Exception as error:  # no Triton, no compiler, no headers, too old a GPU: each has errors of its own
        reason = str(error).partition("\n")[0] or type(error).__name__
        if asked is True:
            raise ConfigError(f"gpu.compile_elementwise is true, but nothing can be compiled: {reason}") from error
        logger.warning("elementwise operators are not compiled, which is slower: %s", reason)
        return None
    return fused_ops
