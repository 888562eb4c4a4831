"""What a layer's experts are: what differs between mixtures. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.layers.layer_spec import GateClamp

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
class ExpertsSpec:
    """What an architecture's file says of the experts of one layer.

    num_active: experts that a token goes through, those of the highest scores of its router.
    inner_size: between an expert's matrices.
    is_normalized: the weights of a token's experts add up to one; otherwise they are what the softmax over the scores
        of all experts gives them.
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
