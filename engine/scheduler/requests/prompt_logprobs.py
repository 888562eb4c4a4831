"""A prompt's log-probabilities, as its chunks bring them. Free of torch."""

from __future__ import annotations

import numpy as np

from engine.contract.messages import LogprobTable
from engine.contract.step import PromptLogprobsChunk


class PromptLogprobs:
    """Collects the chunks of one prompt; one that is computed again replaces what it brought before."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_tokens = num_prompt_tokens - 1
        self._num_done = 0
        self._table: LogprobTable | None = None

    def add(self, chunk: PromptLogprobsChunk) -> None:
        """Take in a chunk; chunks come in the order of their positions, from the start again after a preemption."""
        table = self._table
        if table is None:
            shape = (self._num_tokens, chunk.table.token_ids.shape[1])
            table = self._table = LogprobTable(
                token_ids=np.empty(shape, np.int32),
                logprobs=np.empty(shape, np.float32),
                ranks=np.empty(self._num_tokens, np.int32),
            )
        start = chunk.start - 1
        end = start + len(chunk.table.ranks)
        for mine, theirs in zip(table, chunk.table, strict=True):
            mine[start:end] = theirs
        self._num_done = end

    def table(self) -> LogprobTable:
        """Everything; a prompt of one token has nothing.

        Raises:
            AssertionError: A chunk is missing.
        """
        if self._num_tokens == 0:
            empty = np.empty((0, 1), np.int32)
            return LogprobTable(token_ids=empty, logprobs=empty.astype(np.float32), ranks=empty[:, 0])
        assert self._table is not None
        assert self._num_done == self._num_tokens, f"{self._num_done} of {self._num_tokens} prompt tokens"
        return self._table
