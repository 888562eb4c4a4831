"""Which tokens may be drawn: top-k, then top-p of what remains, then min-p.

Each filter is a threshold on a row's logits, so the result does not depend on how a sort orders equal logits: tokens
that tie with the last kept one are kept too.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

NUM_CANDIDATES = 1024


def thresholds(
    scaled: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    *,
    num_candidates: int = NUM_CANDIDATES,
    sorting: torch.Tensor | None = None,
) -> torch.Tensor:
    """The lowest logit that may be drawn, [num_rows], on the scale of ``scaled``.

    scaled: [num_rows, vocab_size] logits divided by temperature, shifted so that each row's maximum is 0, float32.
    top_k (0: all), top_p (1: all), min_p (0: all): [num_rows].
    num_candidates: how many of the most likely tokens are sorted first.
    sorting: the rows that have a top_k or a top_p, if ``num_candidates`` is known to suffice for their thresholds
        (``num_deciding_candidates``). None: both are found from the logits, which waits for the device.
    """
    lowest = torch.log(min_p)
    is_decided = sorting is not None
    if sorting is None:
        sorting = torch.nonzero((top_k > 0) | (top_p < 1.0)).flatten()
    if sorting.numel() == 0:
        return lowest
    vocab_size = scaled.shape[1]
    part, part_top_k, part_top_p = scaled[sorting], top_k[sorting].long(), top_p[sorting]
    part_top_k = torch.where(part_top_k > 0, part_top_k, vocab_size).clamp(max=vocab_size)
    width = min(num_candidates, vocab_size)
    kept, is_certain = _sorted_threshold(part, part_top_k, part_top_p, width)
    if not is_decided:
        # The most likely tokens suffice for nearly all rows; a flat distribution needs the whole vocabulary sorted.
        unsure = torch.nonzero(~is_certain).flatten()
        if unsure.numel():
            kept[unsure], _ = _sorted_threshold(part[unsure], part_top_k[unsure], part_top_p[unsure], vocab_size)
    lowest[sorting] = torch.maximum(lowest[sorting], kept)
    return lowest


def num_deciding_candidates(top_k: npt.NDArray[np.int32], vocab_size: int) -> int:
    """How many of the most likely tokens suffice for the thresholds of all these rows, whatever their logits are.

    Without a top-k this is the whole vocabulary: a top-p may keep any number of tokens of a flat distribution.
    """
    is_limited = (top_k > 0) & (top_k <= NUM_CANDIDATES)
    return min(NUM_CANDIDATES, vocab_size) if is_limited.all() else vocab_size


def _sorted_threshold(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Thresholds of top-k and top-p from the ``width`` largest logits, and whether these logits were enough."""
    candidates = scaled.topk(width, dim=1).values
    ranks = torch.arange(width, device=scaled.device)[None, :]
    weights = candidates.double().exp()
    weights = weights.masked_fill(ranks >= top_k[:, None], 0.0)
    before = weights.cumsum(dim=1) - weights
    is_limited = top_k < scaled.shape[1]
    mass = torch.where(is_limited, weights.sum(dim=1), scaled.double().exp().sum(dim=1))
    inside_p = (before < (top_p.double() * mass)[:, None]) | (top_p >= 1.0)[:, None]
    num_kept = (inside_p & (ranks < top_k[:, None])).sum(dim=1).clamp(min=1)
    # if top-k reaches beyond the candidates, the total mass that it keeps is unknown
    is_certain = ((num_kept < width) & ~is_limited) | (top_k <= width)
    return candidates.gather(1, num_kept[:, None] - 1).squeeze(1), is_certain
