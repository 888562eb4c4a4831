"""Log-probabilities of prompt tokens, chunk by chunk, for the requests that ask for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import torch

from engine.contract.step import SchedulerOutput
from engine.device.copies import upload
from engine.runner.input_batch import InputBatch
from engine.runner.step_inputs import StepInputs
from engine.sampling.logprobs import LogprobTensors, compute_logprobs

MAX_LOGITS: Final = 8 * 1024 * 1024
"""Most logits held at a time to compute them, however long a chunk is: 32 MiB in float32."""

Logits = Callable[[torch.Tensor], torch.Tensor]


class PromptLogprobsOnDevice(NamedTuple):
    """A ``PromptLogprobsChunk`` on the device."""

    row: int
    start: int
    table: LogprobTensors


def prompt_logprobs(
    hidden: torch.Tensor, inputs: StepInputs, output: SchedulerOutput, batch: InputBatch, logits: Logits
) -> tuple[PromptLogprobsOnDevice, ...]:
    """Log-probabilities of the prompt tokens that follow a step's positions, for rows that ask for them.

    hidden: [num_tokens, hidden_size] of the whole step; ``logits`` turns a part of it into [num_tokens, vocab_size].
    """
    if inputs.is_decode:  # no prompt token follows: the computed tokens are a prompt's last or generated
        return ()
    asking = np.flatnonzero(batch.num_prompt_logprobs[output.rows] >= 0)
    chunks: list[PromptLogprobsOnDevice] = []
    for index in asking.tolist():
        row, first = int(output.rows[index]), int(output.first_positions[index])
        end = min(first + int(output.num_scheduled_tokens[index]), int(batch.history.num_prompt_tokens[row]) - 1)
        if end <= first:
            continue
        begin = int(inputs.attention.query_starts[index])
        following = upload(batch.history.token_ids[row, first + 1 : end + 1], hidden.device)
        part = hidden[begin : begin + end - first]
        table = _in_slices(part, following, int(batch.num_prompt_logprobs[row]), logits)
        chunks.append(PromptLogprobsOnDevice(row=row, start=first + 1, table=table))
    return tuple(chunks)


def _in_slices(hidden: torch.Tensor, token_ids: torch.Tensor, num_top: int, logits: Logits) -> LogprobTensors:
    vocab_size = logits(hidden[:1]).shape[1]
    size = max(MAX_LOGITS // vocab_size, 1)
    tables = [
        compute_logprobs(logits(hidden[start : start + size]), token_ids[start : start + size], num_top)
        for start in range(0, len(token_ids), size)
    ]
    return LogprobTensors(*(torch.cat(columns) for columns in zip(*tables, strict=True)))
