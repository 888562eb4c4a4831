"""A mixture of experts: the router chooses a few MLPs for each token, which gets their weighted sum.

Sources: Shazeer et al., Outrageously Large Neural Networks, 2017; Dai et al., DeepSeekMoE, 2024 (shared experts);
DeepSeek-AI, DeepSeek-V2, 2024 (experts in groups), and DeepSeek-V3, 2024 (corrected scores); Open Compute Project, OCP
Microscaling Formats (MX) 1.0, 2023 (4-bit weights in blocks that share a power-of-two scale).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from engine.layers.activation import ActivationLayer
from engine.layers.experts.compiled import CompiledExperts, Matrices, fits_compiled
from engine.layers.experts.products import ExpertProducts, ExpertsPacker, pack_experts
from engine.layers.experts.spec import (
    BLOCKS_SUFFIX,
    CORRECTION_NAME,
    MXFP4_BLOCK_SIZE,
    SCALES_SUFFIX,
    ExpertsSpec,
    GroupedRouterSpec,
)
from engine.layers.fused_ops import FusedOps
from engine.layers.layer_spec import Activation
from engine.layers.linear import Linear
from engine.layers.mlp import FeedForward

EPSILON = 1e-20
"""Keeps weights finite if all scores are 0."""

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK_BYTES = MXFP4_BLOCK_SIZE // 2
_EXPONENT_BIAS = 127
_NO_NUMBER = 255


class ChosenExperts(NamedTuple):
    """experts and weights, both [num_tokens, num_active], the highest score first; weights are float32."""

    experts: torch.Tensor
    weights: torch.Tensor


def choose_experts(scores: torch.Tensor, spec: ExpertsSpec, correction: torch.Tensor | None) -> ChosenExperts:
    """The experts of each token, chosen by its router's ``scores``, [num_tokens, num_experts] in float32.

    correction: [num_experts] float32, if the router has one.
    """
    if spec.router is not None:
        return _choose_in_groups(scores, spec, spec.router, correction)
    chosen = scores.topk(spec.num_active, dim=1)
    if spec.is_normalized:
        return ChosenExperts(chosen.indices, chosen.values.softmax(dim=1))
    return ChosenExperts(chosen.indices, scores.softmax(dim=1).gather(1, chosen.indices))


def _choose_in_groups(
    scores: torch.Tensor, spec: ExpertsSpec, router: GroupedRouterSpec, correction: torch.Tensor | None
) -> ChosenExperts:
    # A float32 sigmoid rounds differently at the end of a batch than in its middle.
    likely = scores.double().sigmoid().float() if router.is_sigmoid else scores.softmax(dim=1)
    wanted = likely if correction is None else likely + correction
    if router.num_open_groups < router.num_groups:
        by_group = wanted.view(len(wanted), router.num_groups, -1)
        worth = by_group.topk(min(router.num_counted, by_group.shape[2]), dim=2).values.sum(dim=2)
        opened = worth.topk(router.num_open_groups, dim=1).indices
        is_closed = torch.ones_like(worth, dtype=torch.bool).scatter_(1, opened, value=False)
        wanted = by_group.masked_fill(is_closed[:, :, None], -torch.inf).flatten(1)
    experts = wanted.topk(spec.num_active, dim=1).indices
    weights = likely.gather(1, experts)
    if spec.is_normalized:
        weights = weights / (weights.sum(dim=1, keepdim=True) + EPSILON)
    return ChosenExperts(experts, weights * router.scale)


class Mixture:
    """The experts of one layer, a ``FeedForward``.

    A token's result does not depend on the rest of the batch: the products of its experts do not, and their results are
    summed in the order of their scores.
    """

    def __init__(
        self,
        spec: ExpertsSpec,
        hidden_size: int,
        *,
        activation: Activation,
        dtype: torch.dtype,
        device: torch.device,
        fused_ops: FusedOps | None,
        packer: ExpertsPacker = pack_experts,
    ) -> None:
        self._spec, self._packer, self._activation = spec, packer, activation
        self._compiled: CompiledExperts | None = None
        fused = spec.names.are_fused
        # Choices among groups are close calls, so these routers compute in float32, as the reference models do.
        router_dtype = dtype if spec.router is None else torch.float32
        self._router = Linear(hidden_size, (spec.num_experts,), bias=fused, dtype=router_dtype, device=device)
        self._correction: torch.Tensor | None = None
        if spec.router is not None and spec.router.has_correction:
            self._correction = torch.empty(spec.num_experts, dtype=torch.float32, device=device)
        self._gate_up = _Experts(spec, hidden_size, 2 * spec.inner_size, dtype=dtype, device=device)
        self._down = _Experts(spec, spec.inner_size, hidden_size, dtype=dtype, device=device)
        self._gate = ActivationLayer(
            activation, is_gated=True, clamp=spec.clamp, dtype=dtype, device=device, fused_ops=fused_ops
        )

    def targets(self) -> dict[str, torch.Tensor]:
        """See ``FeedForward``."""
        names = self._spec.names
        places = self._router.targets((names.router,))
        if self._correction is not None:
            places[f"{names.router}.{CORRECTION_NAME}"] = self._correction
        places.update(self._gate_up.targets(names.gate_up))
        places.update(self._down.targets((names.down,)))
        return places

    def pack(self) -> None:
        """See ``FeedForward``."""
        self._router.pack()
        gate_up = self._gate_up.take(alternates=self._spec.names.are_fused)
        down = self._down.take(alternates=False)
        if self._packer is pack_experts and fits_compiled(gate_up[0], down[0]):
            self._compiled = CompiledExperts(gate_up, down, activation=self._activation, clamp=self._spec.clamp)
            return
        self._gate_up.multiply, self._down.multiply = self._packer(*gate_up), self._packer(*down)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``FeedForward``."""
        router_dtype = x.dtype if self._spec.router is None else torch.float32
        scores = self._router(x.to(router_dtype)).float()
        experts, weights = choose_experts(scores, self._spec, self._correction)
        if self._compiled is not None:
            return self._compiled(x, experts, weights)
        num_active = self._spec.num_active
        experts, order = experts.flatten().sort(stable=True)
        rows = x.index_select(0, order.div(num_active, rounding_mode="floor"))
        outputs = self._down(self._gate(self._gate_up(rows, experts)), experts)
        by_token = torch.empty_like(outputs).index_copy_(0, order, outputs).view(len(x), num_active, -1)
        # One operator per rounding: fused ones round differently at the end of a row than in its middle.
        total = by_token[:, 0] * weights[:, :1]
        for rank in range(1, num_active):
            total += by_token[:, rank] * weights[:, rank : rank + 1]
        return total.to(x.dtype)


class _Experts:
    """One matrix of all experts, [num_experts, out_size, in_size], and its biases."""

    def __init__(
        self, spec: ExpertsSpec, in_size: int, out_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        count = spec.num_experts
        self._dtype = dtype
        self._blocks: torch.Tensor | None = None
        self._scales: torch.Tensor | None = None
        if spec.is_mxfp4:
            shape = count, out_size, in_size // MXFP4_BLOCK_SIZE
            self._blocks = torch.empty(*shape, BLOCK_BYTES, dtype=torch.uint8, device=device)
            self._scales = torch.empty(*shape, dtype=torch.uint8, device=device)
        self._weight = torch.empty(0 if spec.is_mxfp4 else count, out_size, in_size, dtype=dtype, device=device)
        has_bias = spec.names.are_fused
        self._bias = torch.empty(count, out_size, dtype=dtype, device=device) if has_bias else None
        self.multiply: ExpertProducts | None = None

    def targets(self, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Where the tensors named by ``ExpertNames`` are loaded; two matrices of an expert go side by side."""
        if self._bias is None:
            return {
                f"{name.format(expert)}.weight": part
                for expert, matrix in enumerate(self._weight)
                for name, part in zip(names, matrix.chunk(len(names)), strict=True)
            }
        (name,) = names
        places = {f"{name}_bias": self._bias}
        if self._blocks is None or self._scales is None:
            return {**places, name: self._weight.transpose(1, 2)}
        return {**places, f"{name}{BLOCKS_SUFFIX}": self._blocks, f"{name}{SCALES_SUFFIX}": self._scales}

    def take(self, *, alternates: bool) -> Matrices:
        """Hand the loaded matrices and biases to the caller. Alternating rows are sorted, the even ones first."""
        weight, bias = self._weight, self._bias
        if self._blocks is not None and self._scales is not None:
            parts = zip(self._blocks, self._scales, strict=True)  # one by one: decoding takes much memory
            weight = torch.stack([dequantize(blocks, scales, self._dtype) for blocks, scales in parts])
        self._weight, self._bias, self._blocks, self._scales = weight.new_empty(0), None, None, None
        if alternates:
            weight = torch.cat((weight[:, ::2], weight[:, 1::2]), dim=1)
            bias = None if bias is None else torch.cat((bias[:, ::2], bias[:, 1::2]), dim=1)
        return weight, bias

    def __call__(self, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """See ``ExpertProducts``."""
        assert self.multiply is not None, "pack() comes after loading"
        return self.multiply(rows, experts)


def dequantize(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Decode MXFP4: ``blocks`` [..., num_blocks, BLOCK_BYTES] and ``scales`` [..., num_blocks], both uint8.

    The lower half of each byte comes first.

    Returns:
        [..., num_blocks * MXFP4_BLOCK_SIZE]
    """
    pairs, powers = _tables(blocks.device)
    numbers = pairs[blocks.int()].flatten(-2) * powers[scales.int()].unsqueeze(-1)
    return numbers.flatten(-2).to(dtype)


@cache
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The two numbers that each byte stands for, [256, 2], and the factor of each scale, [256], in float32."""
    values = [*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)]
    pairs = [(values[byte % 16], values[byte // 16]) for byte in range(256)]
    powers = [2.0 ** (scale - _EXPONENT_BIAS) for scale in range(_NO_NUMBER)] + [float("nan")]
    return torch.tensor(pairs, device=device), torch.tensor(powers, device=device)


class SharedExperts:
    """The sum of two ``FeedForward`` parts, such as routed and shared experts; also a ``FeedForward``."""

    def __init__(self, mixture: FeedForward, shared: FeedForward) -> None:
        self._mixture, self._shared = mixture, shared

    def targets(self) -> dict[str, torch.Tensor]:
        """See ``FeedForward``."""
        return {**self._mixture.targets(), **self._shared.targets()}

    def pack(self) -> None:
        """See ``FeedForward``."""
        self._mixture.pack()
        self._shared.pack()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``FeedForward``."""
        return self._mixture(x).add_(self._shared(x))
