"""Products of heads with matrices of their own."""

from __future__ import annotations

import torch

LEAST_TOKENS = 4
"""Fewer are summed up in another order than these among others: 1 on Intel's CPUs, up to 3 on AMD's."""


class HeadProducts:
    """``x[:, head] @ weight[head]`` for every head. weight: [num_heads, in_size, out_size]."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight.contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, num_heads, in_size] to [num_tokens, num_heads, out_size], which may be a view.

        A few tokens are computed as ``LEAST_TOKENS``, so that each has the bits that it has among others.
        """
        num_tokens = len(x)
        if 0 < num_tokens < LEAST_TOKENS and x.device.type == "cpu":
            x = torch.cat([x, x[:1].expand(LEAST_TOKENS - num_tokens, -1, -1)])
        return torch.bmm(x.transpose(0, 1), self._weight).transpose(0, 1)[:num_tokens]
