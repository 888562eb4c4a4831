"""After a step: store what was sampled, publish the blocks that became full, end what ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from engine.contract.block_hash import hash_block, hash_chain
from engine.contract.grammar import GRAMMAR_FAILED
from engine.contract.messages import DeltaLogprobs, DraftCounts, FinishReason, RequestError, TokenDelta, Told
from engine.contract.stats import Counters
from engine.contract.step import (
    EMPTY_INTS,
    BeamCandidates,
    BoolArray,
    IntArray,
    ModelRunnerOutput,
    PromptLogprobsChunk,
    SampledLogprobs,
)
from engine.scheduler.beam_rows import BeamRows
from engine.scheduler.blocks.kv_cache_manager import KVCacheManager
from engine.scheduler.blocks.pending_prefixes import PendingPrefixes
from engine.scheduler.live_requests import LiveRequests
from engine.scheduler.policy.draft_lengths import DraftLengths
from engine.scheduler.remote.announcer import Announcer
from engine.scheduler.requests import row_passes
from engine.scheduler.requests.request import Request
from engine.scheduler.requests.row_table import RowArray, RowTable
from engine.scheduler.step_draft import Batch, StepInFlight
from engine.scheduler.step_result import StepResult, tokens_of

ACCEPTED_AT = (*(f"num_accepted_at_{place}" for place in range(1, 9)), "num_accepted_later")
"""The counters of accepted drafts, by their place."""

NO_FAILURES: Mapping[int, str] = MappingProxyType({})

StepParts: TypeAlias = tuple[Batch, IntArray, IntArray | None]
"""The rows of a step, the tokens that they sampled, and how many of their drafts were right."""


class StepOutputProcessor:
    """Applies the results of steps to rows, blocks and requests."""

    def __init__(
        self,
        *,
        table: RowTable,
        kv_cache: KVCacheManager,
        live_requests: LiveRequests,
        pending: PendingPrefixes,
        announcer: Announcer,
        counters: Counters,
        beams: BeamRows,
        draft_lengths: DraftLengths | None = None,
    ) -> None:
        self._table = table
        self._kv_cache = kv_cache
        self._live_requests = live_requests
        self._pending = pending
        self._announcer = announcer
        self._counters = counters
        self._beams = beams
        self._draft_lengths = draft_lengths
        self._told: list[tuple[str, Told]] = []
        self._found: IntArray = np.empty((row_passes.NUM_FOUND, table.max_num_seqs), np.int32)

    def note_times(self, batch: Batch, seconds: float, *, end_s: float) -> None:
        """Record a step that returned in the timelines of traced requests whose known tokens it computed."""
        table = self._table
        for row in table.unanswered_rows:
            timeline = table.owner(row).timeline
            if timeline is None:
                continue
            for index in np.flatnonzero((batch.rows == row) & (batch.epochs == table.epoch[row])).tolist():
                num_tokens = int(batch.num_scheduled_tokens[index])
                timeline.note_step(start_s=end_s - seconds, end_s=end_s, num_tokens=num_tokens)

    def apply(self, step: StepInFlight, result: ModelRunnerOutput) -> StepResult:
        """Take in a step's tokens, and log-probabilities that were asked for.

        Rows whose request ended or was preempted after the step was scheduled are skipped: their tokens are not needed.
        """
        table, batch = self._table, step.batch
        token_ids, num_accepted = result.sampled_token_ids, result.num_accepted
        if step.num_releases != table.num_releases:
            is_live = table.epoch[batch.rows] == batch.epochs
            batch, token_ids, num_accepted = _part(is_live, batch, token_ids, num_accepted)
        if table.beam_rows:
            batch, token_ids, num_accepted = self._without_beams(batch, token_ids, num_accepted, result.candidates)
        rows, ends, num_samples = batch.rows_int32, batch.ends, batch.num_samples
        if self._announcer.num_announced:
            is_chunk = num_samples == 0
            self._announcer.step_returned(batch.rows[is_chunk], ends[is_chunk])
        found, sampling_rows, starts = self._found, batch.rows, None
        columns, all_tokens, num_stop_columns = table.columns, table.token_ids, table.num_stop_columns
        if num_accepted is None:
            num_full, num_ended = row_passes.append_sampled(
                columns, all_tokens, num_stop_columns, rows, ends, token_ids, num_samples, found
            )
            if batch.total_samples != rows.size:
                assert not batch.draft_token_ids.size, "the runner did not verify the drafts"
                sampling_rows = sampling_rows[num_samples > 0]
        else:
            num_full, num_ended = row_passes.append_verified(
                columns, all_tokens, num_stop_columns, rows, ends, token_ids, num_samples, num_accepted, found
            )
            is_sampling = num_samples > 0
            sampling_rows = sampling_rows[is_sampling]
            num_appended = found[row_passes.NUM_APPENDED, : sampling_rows.size]
            token_ids, starts = _appended_tokens(token_ids, num_samples[is_sampling], num_appended)
            ends = ends.copy()
            ends[is_sampling] += num_appended - 1
            self._take_in_drafts(batch, num_samples, num_appended)
        if num_full:
            full = found[row_passes.FULL, :num_full]
            self._publish_full_blocks(batch.rows[full], ends[full])
        if self._kv_cache.has_windows and (left := table.leave_windows(batch.rows, ends)):
            self._kv_cache.release_behind_window(left)
        if result.prompt_logprobs:
            self._collect(batch.rows, result.prompt_logprobs)
        ended: list[int] = found[row_passes.ENDED, :num_ended].tolist() if num_ended else []
        failures = {failure.row: failure.message for failure in result.failures} if result.failures else NO_FAILURES
        return self._emit(sampling_rows, token_ids, starts, ended, result.logprobs, failures)

    def _without_beams(
        self, batch: Batch, token_ids: IntArray, num_accepted: IntArray | None, candidates: BeamCandidates | None
    ) -> StepParts:
        """Pass beam candidates on to the searches; returns the rest of the step, as if it had no beams."""
        table = self._table
        is_beam = (batch.num_samples > 0) & np.isin(batch.rows, list(table.beam_rows))
        if not is_beam.any():
            return batch, token_ids, num_accepted
        rows, ends = batch.rows[is_beam], batch.ends[is_beam]
        is_full = ends >= table.publish_goal[rows]
        self._publish_full_blocks(rows[is_full], ends[is_full])
        if self._kv_cache.has_windows and (left := table.leave_windows(rows, ends)):
            self._kv_cache.release_behind_window(left)
        self._beams.take_in(rows.tolist(), candidates)
        return _part(~is_beam, batch, token_ids, num_accepted)

    def _take_in_drafts(self, batch: Batch, num_samples: IntArray, num_appended: IntArray) -> None:
        """Count the drafts of a step, and give back blocks that only rejected drafts or tokens after an output's end
        needed.
        """
        is_drafted = num_samples > 1
        num_accepted = num_appended[is_drafted[num_samples > 0]] - 1
        has_drafts = batch.draft_token_ids.size > 0
        if has_drafts:
            self._count_drafts(batch.draft_token_ids.size, num_accepted)
        verified = zip(batch.rows[is_drafted], num_samples[is_drafted] - 1, num_accepted, strict=True)
        for row, num_drafts, num_right in ((int(row), int(drafts), int(right)) for row, drafts, right in verified):
            surplus = self._table.trim_blocks(row)
            if surplus:
                self._kv_cache.release(surplus)
            if not has_drafts:
                continue
            request = self._table.owner(row)
            self._told.append((request.client_id, DraftCounts(request.request_id, num_drafts, num_right)))
            if self._draft_lengths is not None:
                self._draft_lengths.note_verified(request.request_id, num_drafts=num_drafts, num_accepted=num_right)

    def _count_drafts(self, num_drafts: int, num_accepted: IntArray) -> None:
        counters = self._counters
        counters.num_drafted_rows += num_accepted.size
        counters.num_draft_tokens += num_drafts
        counters.num_accepted_draft_tokens += int(num_accepted.sum())
        places = range(1, int(num_accepted.max(initial=0)) + 1)
        for place in places:
            name = ACCEPTED_AT[min(place, len(ACCEPTED_AT)) - 1]
            setattr(counters, name, getattr(counters, name) + int(np.count_nonzero(num_accepted >= place)))

    def publish_loaded(self, request: Request) -> None:
        """Publish the blocks of a loaded request that its load confirmed."""
        block_size, valid_length = self._kv_cache.block_size, request.num_computed_tokens
        invalid_spans = request.invalid_spans
        request.hashes(block_size)
        first_invalid_block = invalid_spans[0].start // block_size if invalid_spans else valid_length // block_size
        first = request.num_published_blocks
        if first < first_invalid_block:
            self._publish(request, first, [table[first:first_invalid_block] for table in request.block_tables])
        for index in range(max(first, first_invalid_block), valid_length // block_size):
            start = index * block_size
            if any(invalid_span.start <= start < invalid_span.end for invalid_span in invalid_spans):
                continue
            self._publish(request, index, [(table[index],) for table in request.block_tables])
            if index > first_invalid_block:
                request.confirmed_blocks.add(index)
        request.num_published_blocks = max(first, first_invalid_block)
        self._pending.claim(request, block_size)

    def _collect(self, live_rows: RowArray, chunks: tuple[PromptLogprobsChunk, ...]) -> None:
        live = set(live_rows.tolist())
        for chunk in chunks:
            if chunk.row in live and (wanted := self._table.owner(chunk.row).prompt_logprobs) is not None:
                wanted.add(chunk)

    def _emit(
        self,
        rows: RowArray,
        token_ids: IntArray,
        starts: IntArray | None,
        ended: list[int],
        logprobs: SampledLogprobs | None,
        failures: Mapping[int, str],
    ) -> StepResult:
        """The result to tell of the rows that sampled; ``ended`` are indices into them. See ``StepResult``."""
        table = self._table
        self._counters.num_generated_tokens += token_ids.size
        owners = table.requests_of(rows)
        special: dict[int, TokenDelta] = {}
        told, self._told = self._told, []
        if table.unanswered_rows:
            unanswered = table.unanswered_rows
            for index, row in enumerate(rows.tolist()):
                if row in unanswered:
                    special[index] = self._first(owners[index], tokens_of(index, token_ids, starts), told)
            unanswered.difference_update(rows.tolist())
        if table.wide_rows:
            last_token_ids = token_ids if starts is None else token_ids[starts[1:] - 1]
            ended = sorted(table.wide_ends(rows, last_token_ids).union(ended))
        if failures:
            ended = self._fail(rows, owners, failures, ended, special)
        for index in ended:
            length = int(table.num_tokens[rows[index]])
            new_tokens = tokens_of(index, token_ids, starts)
            special[index] = self._last(owners[index], new_tokens, length, special.get(index))
        step_result = StepResult(owners, token_ids, starts, special, self._live_requests.take_finished(), told)
        return step_result if logprobs is None else self._with_logprobs(step_result, rows, logprobs)

    def _fail(
        self,
        rows: RowArray,
        owners: Sequence[Request],
        failures: Mapping[int, str],
        ended: list[int],
        special: dict[int, TokenDelta],
    ) -> list[int]:
        """End the requests that failed, without this step's tokens; returns those of ``ended`` that did not fail."""
        failed = [index for index, row in enumerate(rows.tolist()) if row in failures]
        for index in failed:
            error = RequestError(code=GRAMMAR_FAILED, message=failures[int(rows[index])])
            self._live_requests.finish(owners[index])
            first = special.get(index) or TokenDelta(owners[index].request_id, ())
            special[index] = first._replace(token_ids=(), logprobs=None, finish_reason=FinishReason.ERROR, error=error)
        return [index for index in ended if index not in failed]

    @staticmethod
    def _first(request: Request, token_ids: tuple[int, ...], told: list[tuple[str, Told]]) -> TokenDelta:
        request.is_unanswered = False
        if request.timeline is not None:
            told.append((request.client_id, request.timeline.told(request.request_id, queue_s=request.queue_s)))
            request.timeline = None
        return TokenDelta(
            request_id=request.request_id,
            token_ids=token_ids,
            num_cached_tokens=request.num_cached_tokens,
            num_remote_tokens=request.num_remote_tokens,
            logprobs=DeltaLogprobs(prompt=request.prompt_logprobs.table()) if request.prompt_logprobs else None,
            queue_s=request.queue_s,
        )

    @staticmethod
    def _with_logprobs(step_result: StepResult, rows: RowArray, logprobs: SampledLogprobs) -> StepResult:
        """The same result, with log-probabilities in the deltas of the rows that asked for them."""
        requests, token_ids, starts, special, *_ = step_result
        deltas = dict(special)
        first_entries: dict[int, int] = {}
        for number, row in enumerate(logprobs.rows.tolist()):
            first_entries.setdefault(row, number)
        for index, row in enumerate(rows.tolist()):
            first, request = first_entries.get(row), requests[index]
            wanted = request.message.sampling.num_logprobs
            if first is None or wanted is None:
                continue
            delta = deltas.get(index) or TokenDelta(request.request_id, tokens_of(index, token_ids, starts))
            entries = (logprobs.table.entry(first + number, wanted) for number in range(len(delta.token_ids)))
            said = delta.logprobs or DeltaLogprobs()
            deltas[index] = delta._replace(logprobs=said._replace(tokens=tuple(entries)))
        return step_result._replace(special=deltas)

    def _last(self, request: Request, token_ids: tuple[int, ...], length: int, first: TokenDelta | None) -> TokenDelta:
        is_stop = token_ids[-1] in request.stop_ids and length >= request.first_stop
        kv_transfer = None
        if is_stop:
            reason = FinishReason.STOP
        elif length < request.full_limit:
            reason = FinishReason.HANDED_OVER
        else:
            reason = FinishReason.LENGTH
        if reason is FinishReason.HANDED_OVER:
            kv_transfer = self._live_requests.hand_over(request, num_tokens=request.num_prompt_tokens)
        else:
            self._live_requests.finish(request)
        return TokenDelta(
            request_id=request.request_id,
            token_ids=token_ids,
            finish_reason=reason,
            stop_token_id=token_ids[-1] if is_stop else None,
            kv_transfer=kv_transfer,
            num_cached_tokens=first.num_cached_tokens if first else None,
            num_remote_tokens=first.num_remote_tokens if first else None,
            logprobs=first.logprobs if first else None,
            queue_s=first.queue_s if first else None,
        )

    def _publish_full_blocks(self, rows: RowArray, ends: IntArray) -> None:
        """Publish the blocks that this step completed: their KV is in the cache now."""
        goals = self._table.publish_goal[rows]
        is_one_block = ends - goals < self._table.block_size
        for row, end in zip(rows[~is_one_block].tolist(), ends[~is_one_block].tolist(), strict=True):
            self._publish_row(row, end)
        self._publish_one_each(rows[is_one_block], goals[is_one_block])

    def _publish_one_each(self, rows: RowArray, goals: IntArray) -> None:
        """Publish one block of each row, the one that ends at its goal: all that a decode step completes."""
        table, block_size = self._table, self._table.block_size
        indices, block_ids, token_bytes = table.blocks_ending_at(rows, goals)
        table.publish_goal[rows] = goals + block_size
        num_bytes = block_size * table.token_ids.itemsize
        requests: list[Request] = table.owners[rows].tolist()
        columns = zip(requests, indices, zip(*block_ids, strict=True), strict=True)
        for number, (request, index, ids) in enumerate(columns):
            hashes = request.block_hashes
            parent = hashes[index - 1] if index else request.root
            tokens = token_bytes[number * num_bytes : (number + 1) * num_bytes]
            if index == len(hashes):
                hashes.append(hash_block(parent, tokens))
            if len(self._pending):
                self._pending.published((hashes[index],))
            self._kv_cache.publish_one(ids, hashes[index], parent, tokens)
            request.num_published_blocks = index + 1
            if request.confirmed_blocks:
                self._skip_confirmed(request)

    def _publish_row(self, row: int, end: int) -> None:
        table, block_size = self._table, self._table.block_size
        request = table.owner(row)
        first, stop = int(table.publish_goal[row]) // block_size - 1, end // block_size
        hashes = request.block_hashes
        if len(hashes) < stop:
            tokens = table.token_ids[row, len(hashes) * block_size : stop * block_size]
            hashes.extend(hash_chain(hashes[-1] if hashes else request.root, tokens, block_size))
        self._publish(request, first, table.block_table[:, row, first:stop].tolist())
        request.num_published_blocks = stop
        table.publish_goal[row] = (stop + 1) * block_size
        self._skip_confirmed(request)

    def _skip_confirmed(self, request: Request) -> None:
        """Skip the blocks that a load has published already."""
        while request.num_published_blocks in request.confirmed_blocks:
            request.num_published_blocks += 1
        self._table.publish_goal[request.row] = (request.num_published_blocks + 1) * self._table.block_size

    def _publish(self, request: Request, first: int, tables: Sequence[Sequence[int]]) -> None:
        """Publish a request's blocks from index ``first``, one table per group; those outside a window are absent."""
        block_size, hashes = self._kv_cache.block_size, request.block_hashes
        stop = first + len(tables[0])
        offered = hashes[first:stop]
        self._pending.published(offered)
        tokens = request.token_ids if request.row is None else self._table.token_ids[request.row]
        token_bytes = tokens[first * block_size : stop * block_size].tobytes()
        self._kv_cache.publish(tables, offered, hashes[first - 1] if first else request.root, token_bytes)


def _part(is_kept: BoolArray, batch: Batch, token_ids: IntArray, num_accepted: IntArray | None) -> StepParts:
    """Some rows of a step, with the results that belong to them."""
    num_samples = batch.num_samples[is_kept]
    num_scheduled_tokens = batch.num_scheduled_tokens[is_kept]
    num_drafts, has_drafts = np.maximum(batch.num_samples - 1, 0), batch.draft_token_ids.size > 0
    part = Batch(
        rows=batch.rows[is_kept],
        rows_int32=batch.rows_int32[is_kept],
        first_positions=batch.first_positions[is_kept],
        num_scheduled_tokens=num_scheduled_tokens,
        ends=batch.ends[is_kept],
        epochs=batch.epochs[is_kept],
        num_samples=num_samples,
        draft_token_ids=batch.draft_token_ids[np.repeat(is_kept, num_drafts)] if has_drafts else EMPTY_INTS,
        num_tokens=int(num_scheduled_tokens.sum()),
        total_samples=int(num_samples.sum()),
    )
    token_ids = token_ids[np.repeat(is_kept, batch.num_samples)]
    return part, token_ids, None if num_accepted is None else num_accepted[is_kept]


def _appended_tokens(token_ids: IntArray, num_samples: IntArray, num_appended: IntArray) -> tuple[IntArray, IntArray]:
    """The first ``num_appended`` samples of each row, one row after the other, and where each row's begin."""
    starts = np.zeros(num_appended.size + 1, np.int32)
    np.cumsum(num_appended, out=starts[1:])
    places = np.arange(token_ids.size) - np.repeat(np.cumsum(num_samples) - num_samples, num_samples)
    return token_ids[places < np.repeat(num_appended, num_samples)], starts
