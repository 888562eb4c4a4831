"""All that passes between the scheduler and the model runner in one step. Free of torch.

A running request occupies a *row*: a stable index below ``max_num_seqs`` into arrays that the scheduler and the runner
each own a copy of. The scheduler sends what changed (new rows, appended blocks, released rows); a decode step in which
nothing changed is three arrays. What every step makes is a named tuple: a frozen dataclass sets each field by a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from engine.contract.grammar import RowFailure
from engine.contract.messages import LogprobTable, SamplingParams
from kv_transfer.connector import NO_ORDERS, ConnectorOrders

IntArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]
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

    Applied in this order: ``released_rows``, ``new_rows``, appended blocks, copied blocks, then the run.

    rows: [num_reqs] the rows that compute in this step, in batch order.
    first_positions: [num_reqs] the position of the first token that each computes; KV of all positions before it is
        in the cache. (While damaged blocks are recomputed, valid KV may lie after the computed range as well.)
    num_scheduled_tokens: [num_reqs] how many positions each computes, at least 1, its draft tokens included.
    num_samples: [num_reqs] how many tokens are drawn for each: 0 while known tokens remain to be computed; 1 where the
        computed range ends at the last known token, whose successor is drawn; 1 + k where k draft tokens follow the
        last known one. The runner appends the tokens that come out to its own copy of the row. The last token that a
        row without drafts computes may be one that the step before samples, and has not told yet.
    draft_token_ids: [num_draft_tokens] the ``num_samples - 1`` draft tokens of each row that has some, in row order:
        guesses of what follows its last known token. A token is drawn after the last known one and after each draft;
        see ``ModelRunnerOutput`` for what is kept of them.
    append_rows, append_columns, append_block_ids, append_groups: [num_appended]
        block_table[group, row, column] = block_id; with empty ``append_groups`` all are of group 0. Nothing is said
        when a block leaves its group's window and is given to somebody else: entries before the window of what a step
        computes must not be used.
    copy_sources, copy_targets: [num_copied] blocks whose content is copied to others before the run: a beam goes on in
        a copy of the last block of the beam that it came from. No target is a source.
    num_decode_steps: more than 1: every row decodes so many times over, each time the token that was sampled last, and
        its counts of scheduled tokens and of samples are this number. There are no drafts then.
    is_decode: True when every row computes one token and samples one, as far as the scheduler knows: a shorter way to
        the same result. False may be said of any step.
    """

    step_id: int
    rows: IntArray
    first_positions: IntArray
    num_scheduled_tokens: IntArray
    num_samples: IntArray
    draft_token_ids: IntArray = EMPTY_INTS
    is_decode: bool = False
    num_decode_steps: int = 1
    released_rows: IntArray = EMPTY_INTS
    new_rows: tuple[NewRow, ...] = ()
    append_rows: IntArray = EMPTY_INTS
    append_columns: IntArray = EMPTY_INTS
    append_block_ids: IntArray = EMPTY_INTS
    append_groups: IntArray = EMPTY_INTS
    copy_sources: IntArray = EMPTY_INTS
    copy_targets: IntArray = EMPTY_INTS
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
    """Log-probabilities of sampled tokens, of the rows that ask for them; as wide as any of these wants.

    rows: [num_entries] whose sample each entry of the table is; a row has one for each of its samples, in their order.
    """

    rows: IntArray
    table: LogprobTable


class PromptLogprobsChunk(NamedTuple):
    """Log-probabilities of a row's prompt tokens from position ``start`` on."""

    row: int
    start: int
    table: LogprobTable


class BeamCandidates(NamedTuple):
    """The most likely next tokens of the rows that are beams, best first.

    rows: [num_rows]; token_ids, logprobs: [num_rows, num_candidates], logarithms of the model's probabilities after
    penalties and rules. There are as many columns as some row wants.
    """

    rows: IntArray
    token_ids: IntArray
    logprobs: FloatArray


class ModelRunnerOutput(NamedTuple):
    """What one step produced.

    A token that is drawn depends on its row's seed, on its position and on the tokens before it, and on nothing else.
    So a row's draft tokens are right as far as they equal what is drawn in their places, and its output is these and
    the token drawn after them, which is the one that would have come without drafts. What is drawn behind the first
    wrong draft follows tokens that are not the row's: it counts for nothing, and the KV computed there is not valid.

    sampled_token_ids: [sum of num_samples] the tokens drawn for each row, one row after the other.
    num_accepted: [num_reqs] how many draft tokens of each row are right: the first ``num_accepted + 1`` of its sampled
        tokens are its output; where rows decode several times over, ``num_decode_steps - 1`` of each. None where the
        step is one without draft tokens: all that was sampled is output.
    has_nan: [sum of num_samples] True where the logits of a sample that counts held a NaN.
    has_waited: sampling had to wait for the tokens of the step before.
    failures: rows whose requests cannot go on; their tokens count for nothing.
    candidates: of the rows that are beams, and sample: what is to be chosen from. Their sampled tokens count for
        nothing, and the scheduler says by ``new_rows`` how they go on.
    step_ends_s: where rows decoded several times over, when each of these steps ended, if the runner knows.
    """

    sampled_token_ids: IntArray
    num_accepted: IntArray | None = None
    has_nan: BoolArray | None = None
    logprobs: SampledLogprobs | None = None
    prompt_logprobs: tuple[PromptLogprobsChunk, ...] = ()
    has_waited: bool = False
    failures: tuple[RowFailure, ...] = ()
    candidates: BeamCandidates | None = None
    step_ends_s: Sequence[float] | None = None


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
