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


def apply_penalties(
    logits: torch.Tensor, rows: IntArray, positions: IntArray, sampling: SamplingRows, history: TokenHistory
) -> None:
    """Penalise in place the tokens that a row holds.

    Repetition divides positive and multiplies negative logits of every token of prompt and output; presence is
    subtracted once, and frequency once a use, for tokens of the output.

    logits: [num_rows, vocab_size] float32; positions: [num_rows] how many tokens each row holds.
    """
    penalised = np.flatnonzero(sampling.has_penalties[rows])
    if penalised.size == 0:
        return
    chosen = rows[penalised]
    lengths = positions[penalised]
    prompt_lengths = history.num_prompt_tokens[chosen]
    vocab_size = logits.shape[1]
    seen = upload(_counts(history, chosen, np.zeros_like(lengths), lengths, vocab_size), logits.device)
    used = upload(_counts(history, chosen, prompt_lengths, lengths, vocab_size), logits.device)

    def column(values: FloatArray) -> torch.Tensor:
        return upload(values[chosen], logits.device)[:, None]

    index = upload(penalised, logits.device)
    part = logits.index_select(0, index)
    repetition = column(sampling.repetition_penalty)
    repeated = torch.where(part > 0, part / repetition, part * repetition)
    part = torch.where(seen > 0, repeated, part)
    part -= column(sampling.frequency_penalty) * used
    part -= column(sampling.presence_penalty) * (used > 0)
    # a penalty next to 0 takes a logit beyond what float32 holds, and 0 makes a masked one no number
    logits.index_copy_(0, index, part.nan_to_num_(LOWEST, torch.finfo(torch.float32).max, LOWEST))


def _counts(history: TokenHistory, rows: IntArray, starts: IntArray, ends: IntArray, vocab_size: int) -> FloatArray:
    """How often each token occurs in positions ``starts`` to ``ends`` of each row, [num_rows, vocab_size] float32."""
    lengths = np.maximum(ends - starts, 0).astype(np.int64)
    index = np.repeat(np.arange(len(rows)), lengths)
    columns = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths) + np.repeat(starts, lengths)
    flat = index * vocab_size + history.token_ids[rows[index], columns]
    counts = np.bincount(flat, minlength=len(rows) * vocab_size).astype(np.float32)
    return counts.reshape(len(rows), vocab_size)


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
