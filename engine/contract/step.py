"""Everything that passes between the scheduler and the model runner in one step. Free of torch.

A running request occupies a *row*: a stable index below ``max_num_seqs`` into arrays of which the scheduler and the
runner each own a copy. The scheduler sends only changes: new rows, appended blocks, released rows. A decode step
without changes is three arrays. Objects made in every step are named tuples, or have slots and are not frozen: a frozen
dataclass costs a call for each field.
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
    """A request that starts or resumes in a row.

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
    """The work of one step. Those fields come first that every step sets, by position.

    Applied in this order: ``released_rows``, ``new_rows``, appended blocks, copied blocks, then the run.

    rows: [num_reqs] the rows that compute in this step, in batch order.
    first_positions: [num_reqs] the position of the first token that each row computes; the KV of all positions before
        it is in the cache. (While damaged blocks are recomputed, valid KV may lie after the computed range, too.)
    num_scheduled_tokens: [num_reqs] how many positions each row computes, at least 1, its draft tokens included.
    num_samples: [num_reqs] how many tokens are sampled for each row: 0 while known tokens remain to be computed; 1 if
        the computed range ends at the last known token; 1 + k if k draft tokens follow it. The runner appends the
        resulting tokens to its own copy of the row. The last token that a row without drafts computes may be one that
        the step before samples, and whose value the scheduler does not know yet.
    draft_token_ids: [num_draft_tokens] the ``num_samples - 1`` draft tokens of each row that has some, in row order:
        guesses of what follows its last known token. One token is sampled after the last known one and one after each
        draft; ``ModelRunnerOutput`` says which are kept.
    append_rows, append_columns, append_block_ids, append_groups: [num_appended] block_table[group, row, column] =
        block_id; with empty ``append_groups`` all are of group 0. The runner is not told when a block leaves its
        group's window and is given to another request: it must not use entries before the window of what a step
        computes.
    copy_sources, copy_targets: [num_copied] blocks whose content is copied to others before the run: a beam goes on in
        a copy of its parent beam's last block. No target is a source.
    num_decode_steps: if more than 1, every row decodes this many times, each time from the token sampled last. Its
        numbers of scheduled tokens and of samples equal this. There are no drafts then.
    is_decode: True when, as far as the scheduler knows, every row computes one token and samples one. It allows a
        faster way to the same result; False is always correct.
    num_used_blocks: no blocks but these, the first ones of the cache, were ever handed out. 0: unknown.
    """

    step_id: int
    rows: IntArray
    first_positions: IntArray
    num_scheduled_tokens: IntArray
    num_samples: IntArray
    draft_token_ids: IntArray = EMPTY_INTS
    is_decode: bool = False
    num_decode_steps: int = 1
    connector_orders: ConnectorOrders = NO_ORDERS
    num_used_blocks: int = 0
    released_rows: IntArray = EMPTY_INTS
    new_rows: tuple[NewRow, ...] = ()
    append_rows: IntArray = EMPTY_INTS
    append_columns: IntArray = EMPTY_INTS
    append_block_ids: IntArray = EMPTY_INTS
    append_groups: IntArray = EMPTY_INTS
    copy_sources: IntArray = EMPTY_INTS
    copy_targets: IntArray = EMPTY_INTS
    finished_request_ids: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return self.rows.size if self.is_decode else int(self.num_scheduled_tokens.sum())

    @property
    def has_work(self) -> bool:
        """True when the model must compute."""
        return self.rows.size > 0


class SampledLogprobs(NamedTuple):
    """Log-probabilities of sampled tokens, for the rows that ask for them; as wide as the widest request among these.

    rows: [num_entries] the row of each entry of the table; a row has one entry for each of its samples, in order.
    """

    rows: IntArray
    table: LogprobTable


class PromptLogprobsChunk(NamedTuple):
    """Log-probabilities of a row's prompt tokens, beginning at position ``start``."""

    row: int
    start: int
    table: LogprobTable


class BeamCandidates(NamedTuple):
    """The most likely next tokens of the rows that are beams, best first.

    rows: [num_rows]
    token_ids, logprobs: [num_rows, num_candidates], logarithms of the model's probabilities after penalties and rules.
        There are as many columns as the widest row needs.
    """

    rows: IntArray
    token_ids: IntArray
    logprobs: FloatArray


class ModelRunnerOutput(NamedTuple):
    """The result of one step; of one that was done when it was launched, also the ``PendingStep``.

    A sampled token depends only on its row's seed, its position and the tokens before it. So a row's draft tokens are
    right up to the first one that differs from the token sampled in its place. The row's output is the right drafts and
    the token sampled after them, the same tokens as without drafts. Tokens sampled after the first wrong draft count
    for nothing, since they follow tokens that are not the row's, and the KV computed there is not valid.

    sampled_token_ids: [sum of num_samples] the tokens sampled for each row, one row after the other.
    num_accepted: [num_reqs] how many draft tokens of each row are right: the first ``num_accepted + 1`` of its sampled
        tokens are its output. Where rows decode several times, it is ``num_decode_steps - 1`` for each. None in a step
        without draft tokens: all sampled tokens are output.
    has_nan: [sum of num_samples] True where the logits of a sample that counts held a NaN.
    has_waited: sampling had to wait for the tokens of the step before.
    failures: rows whose requests cannot go on; their tokens count for nothing.
    candidates: what the beams that sample are chosen from. The sampled tokens of these rows count for nothing, and the
        scheduler says by ``new_rows`` how they go on.
    step_ends_s: where rows decoded several times, when each of these steps ended, if the runner knows.
    step_cores: as ``StepThreads`` has it, of a runner that knows only at a step's end.
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
    step_cores: float | None = None

    def result(self) -> ModelRunnerOutput:
        """See ``PendingStep``."""
        return self


NOTHING_SAMPLED = ModelRunnerOutput(sampled_token_ids=EMPTY_INTS)


class PendingStep(Protocol):
    """A step that was launched."""

    def result(self) -> ModelRunnerOutput:
        """Wait until the step is done; from then on its KV is in the cache, where a peer may read it. Call it once."""
