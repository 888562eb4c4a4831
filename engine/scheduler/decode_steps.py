"""Several decode steps in one launch, where nothing can change between them. Free of torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine.contract.step import IntArray
from engine.scheduler.live_requests import LiveRequests
from engine.scheduler.remote.loads import RemoteKV
from engine.scheduler.requests.row_table import RowTable
from engine.scheduler.running_pass import RunningPass
from engine.scheduler.step_draft import Batch, StepDraft


class DecodeSteps:
    """Lets the runner make up to ``max_decode_steps`` decode steps before it returns.

    This happens only where every running request decodes, none waits or loads, and the blocks are there: the next steps
    would be the same. No request decodes past its limit: the one nearest to its limit bounds the number of steps.
    Tokens after a stop token are dropped, like those of rejected drafts. One step at a time is made for requests with
    a grammar, with more stop tokens than ``RowTable`` compares by array, or with a promised gap between tokens. A
    request that arrives meanwhile waits until all steps are done. Where the runner ``cuts`` such steps short, new
    requests do not wait, and requests with a promised gap may take part.
    """

    def __init__(
        self,
        max_decode_steps: int,
        *,
        cuts: bool,
        table: RowTable,
        running: RunningPass,
        live_requests: LiveRequests,
        remote: RemoteKV,
    ) -> None:
        self._max_decode_steps = max_decode_steps
        self._cuts = cuts
        self._table = table
        self._running = running
        self._live_requests = live_requests
        self._remote = remote

    def run(self, draft: StepDraft) -> None:
        """Turn a step that only decodes into several decode steps."""
        batch = draft.running
        if batch is None or not batch.is_decode or not self._is_alone(draft, batch):
            return
        num_steps = self._num_steps(draft, batch)
        if num_steps <= 1:
            return
        num_more = (num_steps - 1) * batch.rows.size
        counts: IntArray = np.full(batch.rows.size, num_steps, np.int32)
        # As with drafts: no row is scheduled again before its number of new tokens is known.
        self._table.num_expected[batch.rows] -= 1
        draft.token_budget -= num_more
        draft.num_decode_steps = num_steps
        draft.running = replace(
            batch,
            num_scheduled_tokens=counts,
            num_samples=counts,
            num_tokens=batch.num_tokens + num_more,
            total_samples=batch.total_samples + num_more,
        )

    def _is_alone(self, draft: StepDraft, batch: Batch) -> bool:
        """True when there is no work but these rows, and all of them can make several steps."""
        live, table = self._live_requests, self._table
        if (
            draft.started
            or draft.has_preempted
            or batch.rows.size < len(table)
            or table.wide_rows
            or table.damaged_rows
            or table.beam_rows
        ):
            return False
        if len(live.live) > len(table) or self._remote.has_loads or (table.num_promised and not self._cuts):
            return False
        return not any(request.grammar is not None for request in table.requests_of(batch.rows))

    def _num_steps(self, draft: StepDraft, batch: Batch) -> int:
        """The most steps that all rows can make with the blocks that they have or get."""
        table, rows, ends = self._table, batch.rows, batch.ends
        if (table.num_tokens[rows] != ends).any():
            return 1
        num_steps = min(
            self._max_decode_steps,
            int((table.limit[rows] - ends).min()),
            1 + draft.token_budget // rows.size,
        )
        goals = ends + np.int32(max(num_steps - 1, 0))
        lacking = np.flatnonzero(goals > table.capacity[rows])
        if lacking.size and not self._running.extend(draft, rows[lacking], goals[lacking]):
            num_steps = min(num_steps, 1 + int((table.capacity[rows] - ends).min()))
        return num_steps
