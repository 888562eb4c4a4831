"""The properties in which mixtures of experts differ. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.layers.layer_spec import GateClamp, MLPNames

BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"
"""Name suffixes of the two tensors that hold a matrix in MXFP4."""

MXFP4_BLOCK_SIZE = 32
"""Number of neighbouring numbers of a row that share a scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """The tensors of a mixture in a checkpoint, within a layer.

    gate_up, down: names of the matrices of expert ``{}``. A name without braces is one tensor for all experts,
        [num_experts, in_size, out_size], in which the outputs of gate and up alternate. Such tensors have biases,
        called ``<name>_bias``; and so has the router.
    """

    router: str
    gate_up: tuple[str, ...]
    down: str

    @property
    def are_fused(self) -> bool:
        """True if one tensor holds all experts."""
        return "{}" not in self.down


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedRouterSpec:
    """A router whose experts form groups: a token chooses among the experts of a few groups.

    num_groups: groups of neighbouring experts. num_open_groups: groups that a token chooses among.
    num_counted: a group's score is the sum of this many of its best experts' scores.
    is_sigmoid: scores are independent sigmoids; otherwise a softmax over all experts.
    has_correction: a learned number is added to each score, only for the choice; its tensor is ``CORRECTION_NAME``
        behind the router's name.
    scale: factor of the weights of a token's experts.

    Source: DeepSeek-AI, DeepSeek-V2, 2024, and DeepSeek-V3, 2024.
    """

    num_groups: int
    num_open_groups: int
    num_counted: int
    is_sigmoid: bool
    has_correction: bool
    scale: float


CORRECTION_NAME = "e_score_correction_bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """The experts of one layer, as an architecture's file describes them.

    num_active: experts that a token goes through, those with the router's highest scores.
    inner_size: numbers between an expert's matrices.
    is_normalized: the weights of a token's experts sum to one; otherwise they are the softmax over the scores of all
        experts.
    router: how experts are chosen, if not by their scores alone.
    shared: the plain MLP that every token also goes through, with ``shared_size`` numbers between its matrices.
    clamp: how the gate is bounded; None: as in the model's plain MLPs.
    is_mxfp4: the checkpoint holds fused matrices in MXFP4, as [num_experts, out_size, in_size]; products are in the
        dtype of the model.
    """

    num_experts: int
    num_active: int
    inner_size: int
    is_normalized: bool
    names: ExpertNames
    clamp: GateClamp | None = None
    is_mxfp4: bool = False
    router: GroupedRouterSpec | None = None
    shared: MLPNames | None = None
    shared_size: int = 0
