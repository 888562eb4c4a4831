"""Products of heads with matrices of their own."""

from __future__ import annotations

import torch


class HeadProducts:
    """``x[:, head] @ weight[head]`` for every head. weight: [num_heads, in_size, out_size]."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight.contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, num_heads, in_size] to [num_tokens, num_heads, out_size], which may be a view.

        One token is computed as two: alone it would be summed up in another order than among others.
        """
        num_tokens = len(x)
        if num_tokens == 1 and x.device.type == "cpu":
            x = x.expand(2, -1, -1)
        return torch.bmm(x.transpose(0, 1), self._weight).transpose(0, 1)[:num_tokens]
