"""The operations between matrix products and attention: as torch operators, or as fused kernels on GPUs."""

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
    """activation(gate) * up for [num_tokens, 2 * size], the gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activate_plain(gate, activation) * up


def root_mean_square_norm(x: torch.Tensor, weight: torch.Tensor, spec: NormSpec) -> torch.Tensor:
    """Divide the last dimension by its root mean square, then multiply by a weight; an offset is added in float32."""
    if spec.offset == 0:
        return F.rms_norm(x, (x.shape[-1],), weight, spec.eps)
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float() + spec.offset, spec.eps).to(x.dtype)


class FusedOps(Protocol):
    """Operator sequences that treat each token separately, each fused into one kernel."""

    def add_norm(self, hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Add ``delta`` to ``hidden`` in place, and return the normalised sum: [num_tokens, size], contiguous."""

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``activate_halves`` of [num_tokens, 2 * size], contiguous."""

    def place_heads(
        self,
        heads: torch.Tensor,
        counts: tuple[int, int],
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        rotations: Rotations,
        cache: tuple[torch.Tensor, torch.Tensor],
        places: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Normalise queries and keys if ``norms`` are given, rotate them, and write keys and values to the cache.

        heads: [num_tokens, num_heads + 2 * num_kv_heads, head_dim]. counts: num_heads and num_kv_heads.
        norms: the weights for queries and keys, [head_dim] each. cache: keys and values, each [num_blocks, block_size,
            num_kv_heads, head_dim]. places: block ids and offsets, each [num_tokens].

        Returns:
            The queries, [num_tokens, num_heads, head_dim].
        """


Build = Callable[[FusedSpec], FusedOps]


def build_triton_ops(spec: FusedSpec) -> FusedOps:
    """The Triton implementation.

    Raises:
        ImportError: There is no Triton.
    """
    from engine.layers.triton_ops import TritonOps  # imported late: it needs Triton

    return TritonOps(spec)


@torch.inference_mode()
def choose_fused_ops(
    asked: Switch, device: torch.device, dtype: torch.dtype, *, spec: FusedSpec, build: Build = build_triton_ops
) -> FusedOps | None:
    """Fused operators if they are wanted and work here; otherwise None, with one warning that says why they do not.

    Raises:
        ConfigError: They are required, but do not work.
    """
    if asked is False or (device.type == "cpu" and asked == "auto"):
        return None
    if device.type == "cpu":
        raise ConfigError(f"gpu.compile_elementwise is true, but the device is {device}; set it to auto or false")
    try:
        fused_ops = build(spec)
        fused_ops.gate(torch.ones(1, 64, dtype=dtype, device=device))  # compile it
    except Exception as error:  # missing Triton, compiler or headers, or an old GPU: each raises other errors
        reason = str(error).partition("\n")[0] or type(error).__name__
        if asked is True:
            raise ConfigError(
                f"gpu.compile_elementwise is true, but kernels cannot be compiled: {reason}; set it to auto or false"
            ) from error
        logger.warning("elementwise operators are not compiled, which makes steps slower: %s", reason)
        return None
    return fused_ops
