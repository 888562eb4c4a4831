"""What a layer's experts are: what differs between mixtures. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.layers.layer_spec import GateClamp, MLPNames

BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"
"""Of the two tensors that hold a matrix in MXFP4."""

MXFP4_BLOCK_SIZE = 32
"""Neighbouring numbers of a row that share a scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """The tensors of a checkpoint, within a layer.

    gate_up, down: as they are called of expert ``{}``; without braces, of all experts in one tensor
    [num_experts, in_size, out_size], in which the outputs of gate and up alternate. Those have biases, called
    ``<name>_bias``; and so has the router.
    """

    router: str
    gate_up: tuple[str, ...]
    down: str

    @property
    def are_fused(self) -> bool:
        """True where one tensor holds all experts."""
        return "{}" not in self.down


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedRouterSpec:
    """A router whose experts lie in groups: a token chooses among those of a few groups.

    num_groups, num_open_groups: groups of neighbouring experts, and how many of them a token chooses among.
    num_counted: a group is worth the sum of its best so many scores.
    is_sigmoid: each score is a sigmoid of its own; otherwise the scores of all experts are a softmax.
    has_correction: a learned number is added to each score for the choice alone; its tensor is called
        ``CORRECTION_NAME``, behind the router's name.
    scale: what the weights of a token's experts are multiplied with.

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
    """What an architecture's file says of the experts of one layer.

    num_active: experts that a token goes through, those of the highest scores of its router.
    inner_size: between an expert's matrices.
    is_normalized: the weights of a token's experts add up to one; otherwise they are what the softmax over the scores
        of all experts gives them.
    router: how experts are chosen, where it is not by their scores alone.
    shared: the plain MLP that every token goes through as well, of ``shared_size`` numbers between its matrices.
    clamp: how the gate is bounded; None: it is that of the model's plain MLPs.
    is_mxfp4: the checkpoint holds fused matrices in four bits, as [num_experts, out_size, in_size]; products are
        in the dtype of the model.
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
