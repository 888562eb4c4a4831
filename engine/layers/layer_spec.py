"""The parts of a decoder's layers other than attention, as they differ between architectures. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Activation(StrEnum):
    """Activation of an MLP. ``GELU`` uses the error function, ``GELU_TANH`` its approximation by tanh."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True, kw_only=True)
class GateClamp:
    """A bounded gate: ``g * sigmoid(alpha * g) * (u + 1)``, with ``g`` at most ``limit`` and ``u`` within +-limit.

    Source: gpt-oss, OpenAI, 2025.
    """

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPNames:
    """The tensors of a plain MLP in a checkpoint, within a layer; see ``TensorNames``."""

    into: tuple[str, ...]
    down: str
    is_transposed: bool


class NormKind(StrEnum):
    """``RMS`` divides by the root mean square; ``LAYER`` first subtracts the mean, and adds a learnt bias."""

    RMS = "rms"
    LAYER = "layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """A norm. offset: number added to the stored weights, since some checkpoints store their difference from 1."""

    kind: NormKind = NormKind.RMS
    eps: float = 1e-6
    offset: float = 0.0


class QueryKeyNorm(StrEnum):
    """What queries and keys are normalised over before rotation."""

    NONE = "none"
    HEAD = "head"
    PROJECTION = "projection"


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedSpec:
    """What fused kernels between a model's matrix products need to know: its norms, its activation, and the factor of
    layer results before they are added to the residual stream.
    """

    norm: NormSpec
    residual_scale: float = 1.0
    activation: Activation = Activation.SILU
