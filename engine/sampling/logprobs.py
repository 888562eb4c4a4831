"""Log-probabilities of tokens under the model: the log-softmax of its raw logits."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LogprobTensors(NamedTuple):
    """The columns of a ``LogprobTable`` as tensors on the device."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor


def compute_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
    """Log-probabilities of one token a row and of the ``num_top`` most likely tokens. Does not wait for the device.

    logits: [num_rows, vocab_size], any float dtype, not modified; token_ids: [num_rows], on the same device.
    """
    limits = torch.finfo(torch.float32)
    values = logits.to(torch.float32, copy=True).nan_to_num_(limits.min, limits.max, limits.min)
    columns = token_ids.to(torch.int64)[:, None]
    chosen = values.gather(1, columns)
    ranks = (values > chosen).sum(dim=1) + 1
    top = values.topk(min(num_top, values.shape[1]), dim=1)
    normalizer = values.logsumexp(dim=1, keepdim=True)
    found = torch.cat((chosen, top.values), dim=1) - normalizer
    return LogprobTensors(
        token_ids=torch.cat((columns, top.indices), dim=1).to(torch.int32),
        logprobs=found,
        ranks=ranks.to(torch.int32),
    )
