"""The rows and blocks of beams: they share what is computed, and copy the blocks that they write to. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from engine.contract.messages import FinishReason
from engine.contract.stats import Counters
from engine.contract.step import BeamCandidates, NewRow
from engine.scheduler.beams.group import BeamGroup, NextBeam
from engine.scheduler.blocks.kv_cache_manager import KVCacheManager
from engine.scheduler.live_requests import LiveRequests, Reports
from engine.scheduler.policy.preemption import PreemptionPolicy
from engine.scheduler.requests.request import Request
from engine.scheduler.requests.row_table import RowTable
from engine.scheduler.running_pass import RunningPass
from engine.scheduler.step_draft import ForkedRow, StepDraft
from kv_transfer.cache_groups import held_blocks


class BeamRows:
    """Passes the candidates of each step to the beam searches, and gives the chosen beams their rows and blocks.

    Each beam is a row of its own. When all rows of a request have returned from a step, its search chooses the next
    beams, and rows that no chosen beam continues are given up at once. Before the next step is put together, each
    remaining row goes on as the first beam that continues it. Every other beam gets a new row: it holds the full blocks
    of its parent row too, and a copy of the last block if that is not full. Where there are no blocks for the copies,
    the request waits, as running requests do that lack blocks.

    Beams publish no blocks: other requests find only their prompt in the cache.
    """

    def __init__(
        self,
        *,
        table: RowTable,
        kv_cache: KVCacheManager,
        live_requests: LiveRequests,
        running: RunningPass,
        preemption: PreemptionPolicy,
        counters: Counters,
    ) -> None:
        self._table = table
        self._kv_cache = kv_cache
        self._live_requests = live_requests
        self._running = running
        self._preemption = preemption
        self._counters = counters
        self.chosen: dict[Request, BeamGroup] = {}
        """Requests whose next beams are chosen and not laid out yet."""

    # ---- after a step

    def take_in(self, rows: Iterable[int], candidates: BeamCandidates | None) -> None:
        """Take in the candidates of these rows, all of which are beams that sampled."""
        assert candidates is not None, "the runner told no candidates of beams"
        places = {row: place for place, row in enumerate(candidates.rows.tolist())}
        for row in rows:
            request = self._table.owner(row)
            assert request.beams is not None
            num = request.beams.search.num_candidates
            place = places[row]
            if request.hands_over_first:
                self._hand_over(request)
            elif request.beams.take_in(row, candidates.token_ids[place, :num], candidates.logprobs[place, :num]):
                self._choose(request, request.beams)

    def _hand_over(self, request: Request) -> None:
        """End a request whose prompt is computed here for another engine; the search begins there."""
        params = self._live_requests.hand_over(request, num_tokens=request.num_prompt_tokens)
        self._live_requests.report(request, FinishReason.HANDED_OVER, kv_transfer=params)

    def _choose(self, request: Request, group: BeamGroup) -> None:
        num_rows = max(len(group.rows), 1)
        group.choose()
        search = group.search
        self._counters.num_generated_tokens += num_rows
        if search.is_over:
            self._live_requests.finish(request)
            reason = FinishReason.LENGTH if search.results[0].stop_token_id is None else FinishReason.STOP
            self._live_requests.report(request, reason, beams=search.results)
            return
        assert group.next_beams is not None
        continued = {beam.parent_row for beam in group.next_beams}
        for row in set(request.rows) - continued:
            self._live_requests.give_up_row(row)
        self.chosen[request] = group

    # ---- before a step

    def lay_out(self, draft: StepDraft) -> None:
        """Lay out the chosen beams, in the order in which their requests are served."""
        for request in sorted(self.chosen, key=self._preemption.key):
            group = self.chosen[request]
            if group.next_beams is None:  # the request lost its rows
                del self.chosen[request]
            elif self._has_room(request, group.next_beams, draft):
                del self.chosen[request]
                group.rows = self._lay_out(group.next_beams, draft)
                group.next_beams = None

    def _has_room(self, request: Request, beams: Sequence[NextBeam], draft: StepDraft) -> bool:
        """True when there are blocks for all copies, if need be by preempting others; False: the request waits."""
        num_blocks = self._num_copies(beams) * self._kv_cache.groups.num_groups
        if num_blocks <= self._kv_cache.num_free:
            return True
        draft.is_blocked = True
        num_requests = self._table.num_requests
        has_room = self._running.find_room(request, num_blocks)
        draft.has_preempted |= self._table.num_requests < num_requests
        return has_room

    def _num_copies(self, beams: Sequence[NextBeam]) -> int:
        num_computed = self._num_computed(beams[0].parent_row)
        has_partial = num_computed % self._table.block_size != 0
        return (len(beams) - len({beam.parent_row for beam in beams})) * has_partial

    def _num_computed(self, row: int) -> int:
        """Computed positions of a row whose beams were chosen: all of its known tokens."""
        return int(self._table.num_computed[row])

    def _lay_out(self, beams: Sequence[NextBeam], draft: StepDraft) -> tuple[int, ...]:
        num_computed = self._num_computed(beams[0].parent_row)
        rows: list[int] = []
        for beam in beams:
            is_fresh = beam.parent_row in rows
            row, copies = self._fork(beam.parent_row, num_computed) if is_fresh else (beam.parent_row, ())
            rows.append(row)
            draft.forked += (ForkedRow(row, int(self._table.epoch[row]), is_fresh, copies),)
        for row, beam in zip(rows, beams, strict=True):
            self._table.go_on_with(row, num_computed, beam.token_ids)
        return tuple(rows)

    def _fork(self, parent_row: int, num_computed: int) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Make a row that shares what ``parent_row`` computed; returns it, and which blocks to copy for it."""
        table, block_size = self._table, self._table.block_size
        num_full = num_computed // block_size
        copies: tuple[tuple[int, int], ...] = ()
        if num_computed % block_size:
            fresh = self._kv_cache.allocate_by_group([1] * self._kv_cache.groups.num_groups)
            sources = [group_table[num_full] for group_table in table.block_tables(parent_row)]
            copies = tuple(zip(sources, [ids[0] for ids in fresh], strict=True))
        row = table.fork(parent_row, num_computed, [target for _, target in copies])
        shared = [group_table[:num_full] for group_table in table.block_tables(row)]
        self._kv_cache.hold(held_blocks(shared))
        return row, copies

    # ---- what the runner is told

    def tell(self, draft: StepDraft, reports: Reports) -> Reports:
        """Tell the runner of the beams that were laid out (``draft.forked``) and still have their rows.

        Returns:
            The reports, with the rows to release before the step. Rows that go on are released and set anew. Rows that
            lost their request before the runner knew of them are left out.
        """
        released = reports.released_rows.tolist()
        for forked in draft.forked:
            if self._table.epoch[forked.row] != forked.epoch:
                if forked.is_fresh:
                    released.remove(forked.row)
                continue
            if not forked.is_fresh:
                released.append(forked.row)
            draft.copies += forked.copies
            draft.new_rows += (self._new_row(forked.row),)
        return reports._replace(released_rows=np.array(released, np.int32))

    def _new_row(self, row: int) -> NewRow:
        request, num_tokens = self._table.owner(row), int(self._table.num_tokens[row])
        return NewRow(
            row=row,
            request_id=request.request_id,
            token_ids=self._table.token_ids[row, :num_tokens].copy(),
            num_prompt_tokens=request.num_prompt_tokens,
            block_ids=self._table.padded_block_tables(row),
            sampling=request.message.sampling,
        )
