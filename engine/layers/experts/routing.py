"""Which experts a token goes through, and what each of them weighs.

Source: DeepSeek-AI, DeepSeek-V2, 2024 (experts in groups), and DeepSeek-V3, 2024 (scores that are corrected).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.layers.experts.spec import ExpertsSpec, GroupedRouterSpec

EPSILON = 1e-20
"""Keeps weights finite where all scores are 0."""


class ChosenExperts(NamedTuple):
    """Both [num_tokens, num_active], the highest score first; weights are float32."""

    experts: torch.Tensor
    weights: torch.Tensor


def choose_experts(scores: torch.Tensor, spec: ExpertsSpec, correction: torch.Tensor | None) -> ChosenExperts:
    """The experts of each token by its router's ``scores``, [num_tokens, num_experts] in float32.

    correction: [num_experts] float32, where the router has one.
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
    # In float32 a sigmoid rounds otherwise at the end of a batch than in its middle.
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
