"""After a step: store what was sampled, publish the blocks that became full, end what ended."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.contract.block_hash import BlockHash, group_hash, hash_block, hash_chain
from engine.contract.messages import DeltaLogprobs, FinishReason, TokenDelta
from engine.contract.stats import Counters
from engine.contract.step import IntArray, ModelRunnerOutput, PromptLogprobsChunk, SampledLogprobs
from engine.scheduler.blocks.kv_cache_manager import KVCacheManager
from engine.scheduler.blocks.pending_prefixes import PendingPrefixes
from engine.scheduler.live_requests import LiveRequests
from engine.scheduler.remote.announcer import Announcer
from engine.scheduler.requests import row_passes
from engine.scheduler.requests.request import Request
from engine.scheduler.requests.row_table import RowArray, RowTable
from engine.scheduler.step_draft import Batch, StepInFlight
from engine.scheduler.step_result import StepResult
from kv_transfer.cache_groups import ABSENT_BLOCK


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
    ) -> None:
        self._table = table
        self._kv_cache = kv_cache
        self._live_requests = live_requests
        self._pending = pending
        self._announcer = announcer
        self._counters = counters
        self._found: IntArray = np.empty((2, table.max_num_seqs), np.int32)

    def apply(self, step: StepInFlight, result: ModelRunnerOutput) -> StepResult:
        """Take in a step's tokens, and what was asked for about them.

        Rows whose request ended or was preempted since the step was scheduled are skipped: nobody waits for them.
        """
        table, batch = self._table, step.batch
        token_ids = result.sampled_token_ids
        if step.num_releases != table.num_releases:
            batch, token_ids = self._live_part(batch, token_ids)
        if self._announcer.is_active:
            is_chunk = ~batch.is_sampling
            self._announcer.step_returned(batch.rows[is_chunk], batch.ends[is_chunk])
        rows, ends, is_sampling = batch.rows_int32, batch.ends, batch.is_sampling
        found = self._found
        num_full, num_ended = row_passes.append_sampled(
            table.columns, table.token_ids, table.num_stop_columns, rows, ends, token_ids, is_sampling, found
        )
        if num_full:
            full = found[0, :num_full]
            self._publish_full_blocks(batch.rows[full], ends[full])
        if self._kv_cache.groups.has_windows and (left := table.leave_windows(batch.rows, ends)):
            self._kv_cache.release_behind_window(left)
        if result.prompt_logprobs:
            self._collect(batch.rows, result.prompt_logprobs)
        sampling_rows = batch.rows
        if batch.num_sampling != rows.size:
            sampling_rows, token_ids = sampling_rows[is_sampling], token_ids[is_sampling]
        return self._emit(sampling_rows, token_ids, found[1, :num_ended].tolist(), result.logprobs)

    def _live_part(self, batch: Batch, token_ids: IntArray) -> tuple[Batch, IntArray]:
        """What is left of a step, and of the tokens aligned with it."""
        is_live = self._table.epoch[batch.rows] == batch.epochs
        is_sampling = batch.is_sampling[is_live]
        num_scheduled_tokens = batch.num_scheduled_tokens[is_live]
        left = Batch(
            rows=batch.rows[is_live],
            rows_int32=batch.rows_int32[is_live],
            first_positions=batch.first_positions[is_live],
            num_scheduled_tokens=num_scheduled_tokens,
            ends=batch.ends[is_live],
            epochs=batch.epochs[is_live],
            is_sampling=is_sampling,
            num_tokens=int(num_scheduled_tokens.sum()),
            num_sampling=int(is_sampling.sum()),
        )
        return left, token_ids[is_live]

    def publish_loaded(self, request: Request) -> None:
        """Offer the blocks of a loaded request that its load confirmed."""
        block_size, valid_length = self._kv_cache.block_size, request.num_computed_tokens
        invalid_spans = request.invalid_spans
        request.hashes(block_size)
        first_invalid_block = invalid_spans[0].start // block_size if invalid_spans else valid_length // block_size
        for index in range(request.num_published_blocks, valid_length // block_size):
            start = index * block_size
            if any(invalid_span.start <= start < invalid_span.end for invalid_span in invalid_spans):
                continue
            self._publish(request, index, [table[index] for table in request.block_tables])
            if index > first_invalid_block:
                request.confirmed_blocks.add(index)
        request.num_published_blocks = max(request.num_published_blocks, first_invalid_block)
        self._pending.claim(request, block_size)

    def _collect(self, live_rows: RowArray, chunks: tuple[PromptLogprobsChunk, ...]) -> None:
        live = set(live_rows.tolist())
        for chunk in chunks:
            if chunk.row in live and (wanted := self._table.owner(chunk.row).prompt_logprobs) is not None:
                wanted.add(chunk)

    def _emit(
        self, rows: RowArray, token_ids: IntArray, ended: list[int], logprobs: SampledLogprobs | None
    ) -> StepResult:
        """What the rows that sampled have to say; ``ended`` are indices into them."""
        table = self._table
        self._counters.num_generated_tokens += rows.size
        owners = table.requests_of(rows)
        special: dict[int, TokenDelta] = {}
        if table.silent_rows:
            silent = table.silent_rows
            for index, row in enumerate(rows.tolist()):
                if row in silent:
                    special[index] = self._first(owners[index], int(token_ids[index]))
            silent.difference_update(rows.tolist())
        if table.wide_rows:
            ended = sorted(table.wide_ends(rows, token_ids).union(ended))
        for index in ended:
            length = int(table.num_tokens[rows[index]])
            special[index] = self._last(owners[index], int(token_ids[index]), length, special.get(index))
        if logprobs is not None:
            self._add_logprobs(special, rows, owners, token_ids, logprobs)
        return StepResult(
            requests=owners, token_ids=token_ids, special=special, finished=self._live_requests.take_finished()
        )

    @staticmethod
    def _first(request: Request, token_id: int) -> TokenDelta:
        request.is_unanswered = False
        return TokenDelta(
            request_id=request.request_id,
            token_ids=(token_id,),
            num_cached_tokens=request.num_cached_tokens,
            num_remote_tokens=request.num_remote_tokens,
            logprobs=DeltaLogprobs(prompt=request.prompt_logprobs.table()) if request.prompt_logprobs else None,
            queue_s=request.queue_s,
        )

    @staticmethod
    def _add_logprobs(
        special: dict[int, TokenDelta],
        rows: RowArray,
        owners: list[Request],
        token_ids: IntArray,
        logprobs: SampledLogprobs,
    ) -> None:
        """Turn the deltas of rows that asked into ones that say it."""
        at = {row: number for number, row in enumerate(logprobs.rows.tolist())}
        for index, row in enumerate(rows.tolist()):
            number, request = at.get(row), owners[index]
            wanted = request.message.sampling.num_logprobs
            if number is None or wanted is None:
                continue
            delta = special.get(index) or TokenDelta(request.request_id, (int(token_ids[index]),))
            said = delta.logprobs or DeltaLogprobs()
            special[index] = delta._replace(logprobs=said._replace(tokens=(logprobs.table.entry(number, wanted),)))

    def _last(self, request: Request, token_id: int, length: int, first: TokenDelta | None) -> TokenDelta:
        is_stop = token_id in request.stop_ids and length >= request.first_stop
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
            token_ids=(token_id,),
            finish_reason=reason,
            stop_token_id=token_id if is_stop else None,
            kv_transfer=kv_transfer,
            num_cached_tokens=first.num_cached_tokens if first else None,
            num_remote_tokens=first.num_remote_tokens if first else None,
            logprobs=first.logprobs if first else None,
            queue_s=first.queue_s if first else None,
        )

    def _publish_full_blocks(self, rows: RowArray, ends: IntArray) -> None:
        """Offer the blocks that this step completed: their KV is in the cache now."""
        goals = self._table.publish_goal[rows]
        is_one_block = ends - goals < self._table.block_size
        for row, end in zip(rows[~is_one_block].tolist(), ends[~is_one_block].tolist(), strict=True):
            self._publish_row(row, end)
        self._publish_one_each(rows[is_one_block], goals[is_one_block])

    def _publish_one_each(self, rows: RowArray, goals: IntArray) -> None:
        """What decoding needs: each of these rows filled exactly the block that ends at its goal."""
        table, block_size = self._table, self._table.block_size
        indices, block_ids, token_bytes = table.blocks_ending_at(rows, goals)
        table.publish_goal[rows] = goals + block_size
        num_bytes = block_size * table.token_ids.itemsize
        requests: list[Request] = table.owners[rows].tolist()
        for number, (request, index, *ids) in enumerate(zip(requests, indices, *block_ids, strict=True)):
            hashes = request.block_hashes
            if index == len(hashes):
                parent = hashes[-1] if hashes else request.root
                hashes.append(hash_block(parent, token_bytes[number * num_bytes : (number + 1) * num_bytes]))
            self._publish(request, index, ids)
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
        for index, block_ids in enumerate(table.block_table[:, row, first:stop].T.tolist(), start=first):
            self._publish(request, index, block_ids)
        request.num_published_blocks = stop
        table.publish_goal[row] = (stop + 1) * block_size
        self._skip_confirmed(request)

    def _skip_confirmed(self, request: Request) -> None:
        """Go on behind the blocks that a load has published already."""
        while request.num_published_blocks in request.confirmed_blocks:
            request.num_published_blocks += 1
        self._table.publish_goal[request.row] = (request.num_published_blocks + 1) * self._table.block_size

    def _publish(self, request: Request, index: int, block_ids: Sequence[int]) -> None:
        """Offer one block a group; what left its window, or lay before it from the start, is not here to offer."""
        block_hash = request.block_hashes[index]
        if len(self._pending):
            self._pending.published(block_hash)
        if (
            block_ids[0] != ABSENT_BLOCK
            and self._kv_cache.publish(block_ids[0], block_hash)
            and self._kv_cache.records_events
        ):
            self._record(request, index, block_hash)
        for group, block_id in enumerate(block_ids[1:], start=1):
            if block_id != ABSENT_BLOCK:
                self._kv_cache.publish(block_id, group_hash(block_hash, group))

    def _record(self, request: Request, index: int, block_hash: BlockHash) -> None:
        block_size = self._kv_cache.block_size
        tokens = request.token_ids if request.row is None else self._table.token_ids[request.row]
        parent = request.block_hashes[index - 1] if index else request.root
        token_ids = tuple(tokens[index * block_size : (index + 1) * block_size].tolist())
        self._kv_cache.record_stored(block_hash, parent, token_ids)
