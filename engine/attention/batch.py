"""Which tokens of which requests one step computes: what every attention backend gets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.step import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """The requests of one step, their tokens back to back in batch order.

    query_starts: [num_reqs + 1] where each request's tokens begin; the last entry is the number of tokens.
    first_positions: [num_reqs] position of each request's first token.
    block_tables: [num_reqs, max_blocks] the blocks of each request; entries past its end are any valid block.
    slots: [num_tokens] where each token's key and value go: block id * block_size + offset, int64.
    is_reused: the batch comes again for other steps, its contiguous arrays written anew where they are; only for steps
        in which each request computes one token.
    """

    query_starts: IntArray
    first_positions: IntArray
    block_tables: IntArray
    slots: np.ndarray[tuple[int], np.dtype[np.int64]]
    is_reused: bool = False

    @property
    def num_reqs(self) -> int:
        """Requests in the batch."""
        return len(self.first_positions)

    @property
    def is_decode(self) -> bool:
        """True when each request computes one token."""
        return len(self.slots) == len(self.first_positions)

    @property
    def query_lens(self) -> IntArray:
        """[num_reqs] tokens that each request computes."""
        return np.diff(self.query_starts)

    @property
    def seq_lens(self) -> IntArray:
        """[num_reqs] tokens that the last query of each request attends to, itself included."""
        return self.first_positions + self.query_lens
