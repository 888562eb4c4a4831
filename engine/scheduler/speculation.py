"""Speculative decoding, the scheduler's part: adds draft tokens that a step verifies. Free of torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from engine.contract.grammar import GrammarFollower
from engine.contract.step import BoolArray, IntArray
from engine.drafting.proposer import Draft, DraftContext, Drafting, ModelProposer
from engine.scheduler.policy.draft_lengths import DraftLengths
from engine.scheduler.requests.request import Request
from engine.scheduler.requests.row_table import RowArray, RowTable
from engine.scheduler.running_pass import RunningPass
from engine.scheduler.step_draft import Batch, StepDraft, StepInFlight

MODEL_EVIDENCE: Final = 64
"""Evidence class of a draft model's drafts, above that of all other proposers: its acceptance is kept apart."""


class Speculation:
    """Adds draft tokens to the running requests of a step, from what no other work needs.

    Drafts come last: they get what running and waiting requests leave of the token budget and of the free blocks, so
    they keep no request out of the step. A request gets no drafts while its newest token is unknown here because a step
    in flight samples it. While its drafts are in flight it is in no other step: only when they return is it known how
    many were right. Beams get no drafts, nor do requests with more stop tokens than ``RowTable`` compares by array.

    Nothing counts before it is verified: until the step returns, the computed and expected lengths of a row with drafts
    are the same as without them (``row_passes.append_sampled``). ``lengths`` says how many drafts pay. With
    ``may_hold_back``, an engine that runs ahead waits for the newest tokens while it can follow a prediction.
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
        self.served_rows: Collection[int] = table.rows if drafting.serves_all else table.predicted_rows
        """The rows of requests that can have drafts."""
        self._most_samples = drafting.most_samples(table.max_num_seqs)

    @property
    def wants_newest_tokens(self) -> bool:
        """True while no step should be scheduled before the one in flight has returned."""
        if not (self._may_hold_back and self._table.predicted_rows):
            return False
        return self._lengths is None or not self._lengths.is_at_rest(len(self._table))

    def run(self, draft: StepDraft) -> None:
        """Give drafts to the running requests that decode in this step; only while there are ``served_rows``."""
        batch, table = draft.running, self._table
        if batch is None or draft.token_budget <= 0:
            return
        if self._lengths is not None and self._lengths.rests(batch.rows.size):
            return
        rows, ends = batch.rows, batch.ends
        room = self._room(batch)
        asked = np.flatnonzero(room > 0)
        if asked.size == 0:
            return
        contexts = self._contexts(rows[asked], room[asked])
        budget = min(draft.token_budget, self._most_samples - batch.total_samples)
        proposals = self._propose(contexts, batch, budget)
        counts: IntArray = np.zeros(rows.size, np.int32)
        counts[asked] = [len(proposal.token_ids) for proposal in proposals]
        self._find_blocks(draft, rows, ends, counts)
        num_drafts = int(counts.sum())
        if num_drafts == 0:
            return
        chosen = zip(proposals, counts[asked].tolist(), strict=True)
        parts = [np.asarray(proposal.token_ids[:count], np.int32) for proposal, count in chosen]
        # Rows with drafts are not scheduled again before these are verified: until then their length is unknown.
        table.num_expected[rows[counts > 0]] -= 1
        draft.token_budget -= num_drafts
        draft.running = replace(
            batch,
            num_scheduled_tokens=batch.num_scheduled_tokens + counts,
            num_samples=batch.num_samples + counts,
            draft_token_ids=np.concatenate(parts),
            num_tokens=batch.num_tokens + num_drafts,
            total_samples=batch.total_samples + num_drafts,
        )

    def _room(self, batch: Batch) -> IntArray:
        """The most drafts that each row could have."""
        table, drafting, rows = self._table, self._drafting, batch.rows
        room: IntArray = np.full(rows.size, drafting.max_draft_tokens if drafting.serves_all else 0, np.int32)
        if table.predicted_rows:
            most = drafting.max_predicted_tokens or drafting.max_draft_tokens
            room[np.isin(rows, list(table.predicted_rows))] = most
        np.minimum(room, table.limit[rows] - batch.ends - 1, out=room)
        room[(batch.num_samples == 0) | (table.num_tokens[rows] != batch.ends)] = 0
        if undrafted := table.wide_rows | table.beam_rows:
            room[np.isin(rows, list(undrafted))] = 0
        return room

    def step_returned(self, step: StepInFlight, seconds: float) -> None:
        """Learn from the time of a step that returned; to be called only while there are ``served_rows``."""
        if self._lengths is not None and step.is_alone and not step.batch.has_prompts:
            self._lengths.note_step(step.batch.num_tokens, seconds)

    def requests_finished(self, request_ids: Sequence[str]) -> None:
        """Forget requests that have ended; called once for each."""
        if self._drafting.model is not None:
            self._drafting.model.forget(request_ids)

    def _contexts(self, rows: RowArray, room: IntArray) -> list[DraftContext]:
        """The proposers' view of these rows, each with room for at most ``room`` drafts."""
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
                    request.message.sampling,
                    request.prediction,
                    self._grammar_of(request),
                )
            )
        return contexts

    @staticmethod
    def _grammar_of(request: Request) -> GrammarFollower | None:
        if request.grammar_follower is None and request.grammar is not None:
            request.grammar_follower = request.grammar.new_follower()
        return request.grammar_follower

    def _propose(self, contexts: Sequence[DraftContext], batch: Batch, budget: int) -> list[Draft]:
        """The drafts that each of these requests gets, within the token budget."""
        model = self._drafting.model
        found = [
            self._fitting(context, draft)
            for context, draft in zip(contexts, self._drafting.proposer.propose(contexts), strict=True)
        ]
        counts = np.array([len(draft.token_ids) for draft in found], np.int32)
        np.minimum(counts, [context.max_tokens for context in contexts], out=counts)
        is_by_model = (counts == 0) if model is not None else np.zeros(counts.size, np.bool_)
        most = self._drafting.max_draft_tokens
        for place in np.flatnonzero(is_by_model).tolist():
            counts[place] = min(contexts[place].max_tokens, most)
            found[place] = Draft((), MODEL_EVIDENCE)
        counts = self._within_budget(self._lengths_of(contexts, found, counts, is_by_model, batch), budget)
        drafts = [
            draft._replace(token_ids=draft.token_ids[:count])
            for draft, count in zip(found, counts.tolist(), strict=True)
        ]
        asked = np.flatnonzero(is_by_model & (counts > 0)).tolist()
        if model is not None and asked:
            wanted = [contexts[place]._replace(max_tokens=int(counts[place])) for place in asked]
            for place, draft in zip(asked, self._ask(model, wanted), strict=True):
                drafts[place] = draft
        return drafts

    @staticmethod
    def _fitting(context: DraftContext, draft: Draft) -> Draft:
        """The leading part of a draft that the request's grammar allows; the rest would be computed in vain."""
        if context.grammar is None or not len(draft.token_ids):
            return draft
        guesses = np.asarray(draft.token_ids[: context.max_tokens], np.int32)
        num_fitting = context.grammar.num_fitting(context.token_ids[context.num_prompt_tokens :], guesses)
        return draft._replace(token_ids=guesses[:num_fitting])

    def _ask(self, model: ModelProposer, contexts: Sequence[DraftContext]) -> Sequence[Draft]:
        """Ask the draft model for drafts, and measure how long it takes."""
        if self._lengths is None:
            return model.propose(contexts)
        with self._lengths.drafting(len(contexts)) as measured:
            drafts = model.propose(contexts)
            measured.num_steps = max(len(draft.token_ids) for draft in drafts)
        return drafts

    def _lengths_of(
        self,
        contexts: Sequence[DraftContext],
        drafts: Sequence[Draft],
        counts: IntArray,
        is_by_model: BoolArray,
        batch: Batch,
    ) -> IntArray:
        """How many of its ``counts`` available drafts each of these requests should have."""
        if self._lengths is None:
            return counts
        keys = [(context.request_id, draft.evidence) for context, draft in zip(contexts, drafts, strict=True)]
        num_rows = int(np.count_nonzero(batch.num_samples))
        return self._lengths.choose(
            keys, counts, num_tokens=batch.num_tokens, num_rows=num_rows, is_by_model=is_by_model
        )

    @staticmethod
    def _within_budget(counts: IntArray, token_budget: int) -> IntArray:
        """Cut the drafts to the token budget; the first requests come first."""
        before = np.cumsum(counts) - counts
        within: IntArray = np.clip(token_budget - before, 0, counts).astype(np.int32)
        return within

    def _find_blocks(self, draft: StepDraft, rows: RowArray, ends: IntArray, counts: IntArray) -> None:
        """Append the blocks that the drafts need, or reduce ``counts`` to what fits into the rows' blocks."""
        table = self._table
        goals = ends + counts
        lacking = np.flatnonzero((counts > 0) & (goals > table.capacity[rows]))
        if lacking.size == 0:
            return
        if not self._running.extend(draft, rows[lacking], goals[lacking]):
            counts[lacking] = np.maximum(table.capacity[rows] - ends, 0)[lacking]
