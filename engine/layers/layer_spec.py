"""What a decoder's layers are made of beside attention: what differs between architectures. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Activation(StrEnum):
    """What bends an MLP. ``GELU`` is by the error function, ``GELU_TANH`` its approximation by a hyperbolic tangent."""

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
    """``RMS`` divides by the root mean square; ``LAYER`` takes the mean away first, and adds a learnt bias."""

    RMS = "rms"
    LAYER = "layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """A norm. offset: what is added to the stored weights: some checkpoints hold what they differ from 1 by."""

    kind: NormKind = NormKind.RMS
    eps: float = 1e-6
    offset: float = 0.0


class QueryKeyNorm(StrEnum):
    """What queries and keys are normalised over before they are rotated."""

    NONE = "none"
    HEAD = "head"
    PROJECTION = "projection"


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedSpec:
    """What lies between the matrix products of one model: its norms, what its layers' results are multiplied with
    before they are added to the residual stream, and its activation.
    """

    norm: NormSpec
    residual_scale: float = 1.0
    activation: Activation = Activation.SILU
