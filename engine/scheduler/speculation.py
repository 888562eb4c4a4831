"""Speculative decoding as the scheduler sees it: draft tokens that a step verifies. Free of torch."""

from __future__ import annotations

import numpy as np

from engine.contract.step import IntArray
from engine.drafting.proposer import Draft, DraftContext, Drafting
from engine.scheduler.policy.draft_lengths import DraftLengths
from engine.scheduler.requests.row_table import RowArray, RowTable
from engine.scheduler.running_pass import RunningPass
from engine.scheduler.step_draft import Batch, StepDraft


class Speculation:
    """Adds draft tokens to the running requests of a step, out of what nobody else needs.

    Drafts come last: they get what running and waiting requests left of the token budget and of the free blocks, so
    that they keep nobody out of the step. A request has none while its newest
    token is not known here (a step in flight samples it), and while its drafts are in flight it is in no other step:
    how far it came is known when they have returned. Requests with more stop tokens than ``RowTable`` compares by
    array have none.

    Nothing counts before it is verified: the computed and expected lengths of a row with drafts are those without them
    until the step returns (``row_passes.append_sampled``). ``lengths`` says how many drafts pay. With ``may_hold_back``
    an engine that runs ahead is to wait for the newest tokens while a prediction can be followed.
    """

    def __init__(
        self,
        drafting: Drafting,
        *,
        table: RowTable,
        running: RunningPass,
        lengths: DraftLengths | None = None,
        may_hold_back: bool = False,
    ) -> None:
        self._drafting = drafting
        self._lengths = lengths
        self._table = table
        self._running = running
        self._may_hold_back = may_hold_back
        self._most_samples = table.max_num_seqs * drafting.most_samples_a_request

    @property
    def is_needed(self) -> bool:
        """False while no request here can have drafts."""
        return self._drafting.serves_all or bool(self._table.predicted_rows)

    @property
    def wants_newest_tokens(self) -> bool:
        """True while a step should not be scheduled before the one before it has returned."""
        if not (self._may_hold_back and self._table.predicted_rows):
            return False
        return self._lengths is None or not self._lengths.is_at_rest(len(self._table))

    def run(self, draft: StepDraft) -> None:
        """Give the running requests that decode in the step their drafts."""
        batch, table = draft.running, self._table
        if batch is None or draft.token_budget <= 0 or not self.is_needed:
            return
        if self._lengths is not None and self._lengths.rests(batch.rows.size):
            return
        rows, ends = batch.rows, batch.ends
        room = self._room(batch)
        asked = np.flatnonzero(room > 0)
        if asked.size == 0:
            return
        proposals = self._propose(rows[asked], room[asked])
        counts = np.zeros(rows.size, np.int32)
        budget = min(draft.token_budget, self._most_samples - batch.total_samples)
        counts[asked] = self._within_budget(self._lengths_of(proposals, rows[asked], batch), budget)
        self._find_blocks(draft, rows, ends, counts)
        num_drafts = int(counts.sum())
        if num_drafts == 0:
            return
        chosen = zip(proposals, counts[asked].tolist(), strict=True)
        parts = [np.asarray(proposal.token_ids[:count], np.int32) for proposal, count in chosen]
        # Not to be scheduled again before these are verified: then it is known what there is to compute.
        table.num_expected[rows[counts > 0]] -= 1
        draft.token_budget -= num_drafts
        draft.running = batch._replace(
            num_scheduled_tokens=batch.num_scheduled_tokens + counts,
            num_samples=batch.num_samples + counts,
            draft_token_ids=np.concatenate(parts),
            num_tokens=batch.num_tokens + num_drafts,
            total_samples=batch.total_samples + num_drafts,
        )

    def _room(self, batch: Batch) -> IntArray:
        """How many drafts each row could have at most."""
        table, drafting, rows = self._table, self._drafting, batch.rows
        room: IntArray = np.full(rows.size, drafting.max_draft_tokens if drafting.serves_all else 0, np.int32)
        if table.predicted_rows:
            most = drafting.max_predicted_tokens or drafting.max_draft_tokens
            room[np.isin(rows, list(table.predicted_rows))] = most
        np.minimum(room, table.limit[rows] - batch.ends - 1, out=room)
        room[(batch.num_samples == 0) | (table.num_tokens[rows] != batch.ends)] = 0
        if table.wide_rows:
            room[np.isin(rows, list(table.wide_rows))] = 0
        return room

    def step_scheduled(self, batch: Batch, *, is_alone: bool) -> None:
        """A step begins; it ``is_alone`` where no other one is under way."""
        if self._lengths is not None and is_alone and not batch.has_prompts and self.is_needed:
            self._lengths.step_scheduled(batch.num_tokens)

    def step_returned(self) -> None:
        """A step returned."""
        if self._lengths is not None:
            self._lengths.step_returned()

    def _lengths_of(self, proposals: list[Draft], rows: RowArray, batch: Batch) -> IntArray:
        """How many of its drafts each of these rows should have."""
        counts = np.array([len(proposal.token_ids) for proposal in proposals], np.int32)
        if self._lengths is None:
            return counts
        keys = [
            (self._table.owner(row).request_id, proposal.evidence)
            for row, proposal in zip(rows.tolist(), proposals, strict=True)
        ]
        num_rows = int(np.count_nonzero(batch.num_samples))
        return self._lengths.choose(keys, counts, num_tokens=batch.num_tokens, num_rows=num_rows)

    def _propose(self, rows: RowArray, room: IntArray) -> list[Draft]:
        """What is proposed for each of these rows, at most ``room``."""
        table = self._table
        contexts: list[DraftContext] = []
        for row, length, limit in zip(rows.tolist(), table.num_tokens[rows].tolist(), room.tolist(), strict=True):
            request = table.owner(row)
            contexts.append(
                DraftContext(
                    request.request_id,
                    table.token_ids[row, :length],
                    limit,
                    request.num_prompt_tokens,
                    request.message.cache_salt,
                    request.prediction,
                )
            )
        proposals = self._drafting.proposer.propose(contexts)
        return [
            proposal._replace(token_ids=proposal.token_ids[: context.max_tokens])
            for proposal, context in zip(proposals, contexts, strict=True)
        ]

    @staticmethod
    def _within_budget(counts: IntArray, token_budget: int) -> IntArray:
        """As many of these drafts as the budget has tokens, the first ones first."""
        before = np.cumsum(counts) - counts
        within: IntArray = np.clip(token_budget - before, 0, counts).astype(np.int32)
        return within

    def _find_blocks(self, draft: StepDraft, rows: RowArray, ends: IntArray, counts: IntArray) -> None:
        """Append the blocks that the drafts need, or cut ``counts`` down to what the rows have blocks for."""
        table = self._table
        goals = ends + counts
        lacking = np.flatnonzero((counts > 0) & (goals > table.capacity[rows]))
        if lacking.size == 0:
            return
        if not self._running.extend(draft, rows[lacking], goals[lacking]):
            counts[lacking] = np.maximum(table.capacity[rows] - ends, 0)[lacking]
