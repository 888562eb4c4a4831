"""Changes of the logits that depend on the tokens so far."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.runner.upload import upload
from engine.sample.logit_rules import LOWEST, TOO_EARLY
from engine.sample.sampling_rows import SamplingRows
from engine.sample.token_history import TokenHistory
from engine.step import IntArray

FloatArray = npt.NDArray[np.float32]
LongArray = npt.NDArray[np.int64]


def apply_penalties(
    logits: torch.Tensor, rows: IntArray, positions: IntArray, sampling: SamplingRows, history: TokenHistory
) -> None:
    """Penalise in place the tokens that a row holds: work for these, and not for the whole vocabulary.

    Repetition divides positive and multiplies negative logits of every token of prompt and output; presence is
    subtracted once, and frequency once a use, for tokens of the output.

    logits: [num_rows, vocab_size] float32; positions: [num_rows] how many tokens each row holds.
    """
    penalised = np.flatnonzero(sampling.has_penalties[rows])
    if penalised.size == 0:
        return
    chosen, lengths = rows[penalised], positions[penalised].astype(np.int64)
    owners = np.repeat(np.arange(chosen.size), lengths)
    token_ids = _tokens_of(history, chosen, lengths)
    held = (upload(penalised[owners], logits.device), upload(token_ids, logits.device))

    def of_owner(values: FloatArray) -> torch.Tensor:
        return upload(values[chosen][owners], logits.device)

    # A token that a row holds several times is worked out as often, each time to the same number.
    part, repetition = logits[held], of_owner(sampling.repetition_penalty)
    part = torch.where(part > 0, part / repetition, part * repetition)
    frequency, presence = sampling.frequency_penalty, sampling.presence_penalty
    if frequency[chosen].any() or presence[chosen].any():
        places = np.arange(owners.size) - (np.cumsum(lengths) - lengths)[owners]
        is_output = (places >= history.num_prompt_tokens[chosen][owners]).astype(np.float32)
        used = _sum_of_equals(is_output, owners * logits.shape[1] + token_ids, chosen.size * logits.shape[1], logits)
        part -= of_owner(frequency) * used
        part -= of_owner(presence) * (used > 0)
    # a penalty next to 0 takes a logit beyond what float32 holds, and 0 makes a masked one no number
    logits[held] = part.nan_to_num_(LOWEST, torch.finfo(torch.float32).max, LOWEST)


def _tokens_of(history: TokenHistory, rows: IntArray, lengths: LongArray) -> LongArray:
    """The first ``lengths[i]`` tokens of each row, one row after the other."""
    pairs = zip(rows.tolist(), lengths.tolist(), strict=True)
    return np.concatenate([history.token_ids[row, :length] for row, length in pairs]).astype(np.int64)


def _sum_of_equals(values: FloatArray, keys: LongArray, num_keys: int, like: torch.Tensor) -> torch.Tensor:
    """For each value the sum of those with the same key, where ``like`` lies."""
    index = upload(keys, like.device)
    sums = torch.zeros(num_keys, device=like.device).scatter_add_(0, index, upload(values, like.device))
    return sums.index_select(0, index)


def mask_ending_tokens(logits: torch.Tensor, rows: IntArray, positions: IntArray, sampling: SamplingRows) -> None:
    """Mask the tokens that would end a row, in place, while the row is shorter than it must become."""
    short = np.flatnonzero(positions < sampling.min_length[rows])
    endings = [sampling.ending_token_ids[row] for row in rows[short]]
    if not any(endings):
        return
    index = np.repeat(short, [len(ids) for ids in endings])
    columns = np.fromiter((token for ids in endings for token in ids), dtype=np.int64, count=len(index))
    inside = columns < logits.shape[1]
    logits[upload(index[inside], logits.device), upload(columns[inside], logits.device)] = TOO_EARLY
