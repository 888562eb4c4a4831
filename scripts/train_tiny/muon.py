"""Muon that orthogonalises in the dtype of the training, and all matrices of one shape at once."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn


class Muon(torch.optim.Muon):
    """``torch.optim.Muon`` with ``adjust_lr_fn="original"``, which always orthogonalises in bfloat16.

    Where the CPU emulates bfloat16, those products took longer than all the rest of a step together.
    """

    def __init__(self, params: Any, *, dtype: torch.dtype, lr: float, weight_decay: float) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, adjust_lr_fn="original")
        self._dtype = dtype

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            by_shape: defaultdict[tuple[int, int], list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update = self._momentum(parameter, group["momentum"])
                    num_rows, num_columns = parameter.shape
                    by_shape[min(num_rows, num_columns), max(num_rows, num_columns)].append((parameter, update))
            for members in by_shape.values():
                self._apply(members, group)

    def _momentum(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        """The gradient with Nesterov momentum, [rows, columns]."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer: Tensor = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum)

    def _apply(self, members: list[tuple[nn.Parameter, Tensor]], group: dict[str, Any]) -> None:
        """Decay and update matrices of one shape; tall ones lie on their side."""
        wide = torch.stack([update.T if update.shape[0] > update.shape[1] else update for _, update in members])
        orthogonal = _orthogonalised(wide.to(self._dtype), group)
        for (parameter, _), update in zip(members, orthogonal, strict=True):
            num_rows, num_columns = parameter.shape
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            lr = group["lr"] * max(1.0, num_rows / num_columns) ** 0.5
            parameter.add_(update.T if num_rows > num_columns else update, alpha=-lr)


def _orthogonalised(x: Tensor, group: dict[str, Any]) -> Tensor:
    """Newton-Schulz: matrices [num, rows, columns], rows <= columns, with their singular values near 1.

    Source of the iteration and its coefficients: https://kellerjordan.github.io/posts/muon/
    """
    a, b, c = group["ns_coefficients"]
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x
