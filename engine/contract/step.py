"""All that passes between the scheduler and the model runner in one step. Free of torch.

A running request occupies a *row*: a stable index below ``max_num_seqs`` into arrays that the scheduler and the runner
each own a copy of. The scheduler sends what changed (new rows, appended blocks, released rows); a decode step in which
nothing changed is three arrays. What every step makes is a named tuple: a frozen dataclass sets each field by a call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from engine.contract.messages import LogprobTable, SamplingParams
from kv_transfer.connector import NO_EVENTS, NO_ORDERS, ConnectorEvents, ConnectorOrders

IntArray: TypeAlias = npt.NDArray[np.int32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

EMPTY_INTS: IntArray = np.empty(0, dtype=np.int32)
EMPTY_INTS.setflags(write=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRow:
    """A request that starts, or resumes after preemption, in a row.

    token_ids: [num_known_tokens] prompt and output so far.
    block_ids: [num_groups, num_blocks] its whole block table of each KV cache group; ``ABSENT_BLOCK`` (-1) where a
        block lies before the group's window, or is yet to be appended.
    num_prompt_logprobs: how many most likely tokens to tell for every prompt position computed; None: tell nothing.
    """

    row: int
    request_id: str
    token_ids: IntArray
    num_prompt_tokens: int
    block_ids: IntArray
    sampling: SamplingParams
    num_prompt_logprobs: int | None = None


class SchedulerOutput(NamedTuple):
    """One step's work.

    Applied in this order: ``released_rows``, ``new_rows``, appended blocks, then the run.

    rows: [num_reqs] the rows that compute in this step, in batch order.
    first_positions: [num_reqs] the position of the first token that each computes; KV of all positions before it is
        in the cache. (While damaged blocks are recomputed, valid KV may lie after the computed range as well.)
    num_scheduled_tokens: [num_reqs] how many positions each computes, at least 1.
    is_sampling: [num_reqs] True where the computed range ends at the last known token: sample its successor. The
        runner appends the sampled token to its own copy of the row. The last token that a row computes may be one that
        the step before samples, and has not told yet.
    append_rows, append_columns, append_block_ids, append_groups: [num_appended]
        block_table[group, row, column] = block_id; with empty ``append_groups`` all are of group 0. Nothing is said
        when a block leaves its group's window and is given to somebody else: entries before the window of what a step
        computes must not be used.
    is_decode: True where it is known that every row computes one token and samples; what is laid out is the same if
        nobody knows it.
    """

    step_id: int
    rows: IntArray
    first_positions: IntArray
    num_scheduled_tokens: IntArray
    is_sampling: BoolArray
    is_decode: bool = False
    released_rows: IntArray = EMPTY_INTS
    new_rows: tuple[NewRow, ...] = ()
    append_rows: IntArray = EMPTY_INTS
    append_columns: IntArray = EMPTY_INTS
    append_block_ids: IntArray = EMPTY_INTS
    append_groups: IntArray = EMPTY_INTS
    finished_request_ids: tuple[str, ...] = ()
    connector_orders: ConnectorOrders = NO_ORDERS

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return int(self.num_scheduled_tokens.sum())

    @property
    def has_work(self) -> bool:
        """True when the model must run."""
        return self.rows.size > 0


class SampledLogprobs(NamedTuple):
    """Log-probabilities of the tokens sampled for ``rows``, those that ask for them; as wide as any of them wants."""

    rows: IntArray
    table: LogprobTable


class PromptLogprobsChunk(NamedTuple):
    """Log-probabilities of a row's prompt tokens from position ``start`` on."""

    row: int
    start: int
    table: LogprobTable


class ModelRunnerOutput(NamedTuple):
    """What one step produced.

    sampled_token_ids: [num_reqs] aligned with ``SchedulerOutput.rows``; meaningless where ``is_sampling`` is False.
    has_nan: [num_reqs] True where the logits of a sampling row held a NaN.
    has_waited: sampling had to wait for the tokens of the step before.
    """

    sampled_token_ids: IntArray
    has_nan: BoolArray | None = None
    logprobs: SampledLogprobs | None = None
    prompt_logprobs: tuple[PromptLogprobsChunk, ...] = ()
    has_waited: bool = False
    connector_events: ConnectorEvents = NO_EVENTS


NOTHING_SAMPLED = ModelRunnerOutput(sampled_token_ids=EMPTY_INTS)


class PendingStep(Protocol):
    """A step that was launched."""

    def result(self) -> ModelRunnerOutput:
        """Wait until the step is done: then its KV is in the cache, where a peer may read it. To be called once."""


class FinishedStep(NamedTuple):
    """A step that was done when it was launched. Implements ``PendingStep``."""

    output: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        """What it produced."""
        return self.output


NOTHING_PENDING = FinishedStep(NOTHING_SAMPLED)
