"""Connector events: when a load ends its request goes on, when a lease ends its blocks are freed."""

from __future__ import annotations

from engine.contract.config import SchedulerConfig
from engine.contract.messages import FinishReason, RequestError
from engine.contract.stats import Counters
from engine.scheduler.blocks.kv_cache_manager import KVCacheManager
from engine.scheduler.live_requests import LiveRequests
from engine.scheduler.remote.early_loads import EarlyLoads
from engine.scheduler.remote.leases import BlockLeases
from engine.scheduler.remote.loads import Load, LoadOutcome, RemoteKV, set_computed
from engine.scheduler.requests.request import Request, RequestState
from engine.scheduler.step_output import StepOutputProcessor
from kv_transfer.cache_groups import has_window, held_blocks
from kv_transfer.connector import ConnectorEvents, LeaseEnded, LoadEnded

KV_LOST = "kv_lost"
"""Error code of a request that goes back to its sender because too much of its KV was lost."""

WAITED_IN_A_CIRCLE = "the cache had no room for them while this engine kept blocks for other readers"


class RemoteEvents:
    """Applies each connector event once; unknown, late and duplicate events are counted and ignored."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        kv_cache: KVCacheManager,
        live_requests: LiveRequests,
        remote: RemoteKV,
        early: EarlyLoads,
        leases: BlockLeases,
        step_output: StepOutputProcessor,
        counters: Counters,
    ) -> None:
        self._config = config
        self._kv_cache = kv_cache
        self._live_requests = live_requests
        self._remote = remote
        self._early = early
        self._leases = leases
        self._step_output = step_output
        self._counters = counters

    def apply(self, events: ConnectorEvents) -> None:
        """Take in loads and leases that ended."""
        for load in events.loads:
            self._end_load(load)
        for request_id in events.stalled:
            self._give_up_load(request_id)
        for stream_id in events.ended_streams:
            self._counters.num_unknown_ids += not self._early.end(stream_id)
        for lease in events.leases:
            self._end_lease(lease)

    def do_without(self, request: Request) -> None:
        """Give up the hand-over of a waiting request: it reads nothing, and the other engine's lease ends."""
        num_blocks = self._kv_cache.num_blocks_for(request.num_tokens)
        self._counters.num_standoffs += 1
        if self._config.load_failure_policy == "fail":
            self._fail(request, WAITED_IN_A_CIRCLE, num_failed=num_blocks)
        elif self._is_too_much(request, num_blocks):
            self._fail(request, WAITED_IN_A_CIRCLE, num_failed=num_blocks, code=KV_LOST)
        else:
            self._counters.recomputed_tokens += request.num_tokens - 1
            self._remote.release(request)

    def _end_lease(self, event: LeaseEnded) -> None:
        block_ids = self._leases.end(event)
        if block_ids is None:
            self._counters.num_unknown_ids += 1
        else:
            self._kv_cache.release(block_ids)

    def _end_load(self, event: LoadEnded) -> None:
        ended = self._remote.end(event, block_size=self._kv_cache.block_size)
        if ended.load is None:
            self._counters.num_unknown_ids += 1
            return
        if ended.outcome is LoadOutcome.ABANDONED:
            self._kv_cache.release_tables(ended.load.block_tables)
            return
        request = ended.load.request
        self._note_load(request, ended.load, event)
        request.state = RequestState.READY
        self._live_requests.ready.push(request)
        num_failed = len(ended.damaged_blocks)
        self._counters.failed_blocks += num_failed
        reason = event.error or "no reason given"
        is_repairable = self._is_repairable(ended.load, ended.damaged_blocks)
        num_to_compute = num_failed if is_repairable else ended.load.end_block - ended.load.first_block
        if num_failed and self._config.load_failure_policy == "fail":
            self._fail(request, reason, num_failed=num_failed)
        elif self._is_too_much(request, num_to_compute):
            self._fail(request, reason, num_failed=num_failed, code=KV_LOST)
        elif is_repairable:
            self._resume(request, ended.load, ended.damaged_blocks)
        else:
            self._compute_all(request, ended.load)

    def _note_load(self, request: Request, load: Load, event: LoadEnded) -> None:
        """Record the load in the timeline of a traced request."""
        if request.timeline is not None:
            handed_over = request.message.kv_transfer
            request.timeline.note_load(
                duration_s=event.duration_s,
                num_bytes=event.num_bytes,
                num_blocks=load.end_block - load.first_block,
                num_failed_blocks=len(event.failed_block_ids),
                source=handed_over.source.engine_id if handed_over is not None else "",
            )

    def _give_up_load(self, request_id: str) -> None:
        """A load ran out of time: compute its request here; its destination stays held until the load ends."""
        load = self._remote.wanted_load(request_id)
        if load is None:
            self._counters.num_unknown_ids += 1
            return
        num_blocks = load.end_block - load.first_block
        self._counters.failed_blocks += num_blocks
        if self._config.load_failure_policy == "fail":
            self._fail(load.request, "the load ran out of time", num_failed=num_blocks)
            return
        if self._is_too_much(load.request, num_blocks):
            self._fail(load.request, "the load ran out of time", num_failed=num_blocks, code=KV_LOST)
            return
        self._compute_all(load.request, load)

    def _compute_all(self, request: Request, load: Load) -> None:
        """Compute all that a load was to bring. Nothing that it brought is used, and nothing is loaded again."""
        request.is_load_lost = True
        self._counters.recomputed_tokens += load.num_tokens - load.first_block * self._kv_cache.block_size
        self._live_requests.put_back(request)

    def _is_repairable(self, load: Load, damaged_blocks: tuple[int, ...]) -> bool:
        """True when the KV that the damaged blocks attend to is here, and no other request holds the blocks to be
        rewritten.

        In a group with a window, the load brought only the blocks that the next token's window sees. The window of a
        damaged block begins earlier. Unless that part was loaded too, computing must start from what is cached here.
        """
        if not damaged_blocks or not self._kv_cache.groups.has_windows:
            return True
        first, tables = damaged_blocks[0], load.block_tables
        if not load.shared.isdisjoint(held_blocks([table[first:] for table in tables])):
            return False
        return has_window(self._kv_cache.groups, tables, first * self._kv_cache.block_size)

    def _is_too_much(self, request: Request, num_blocks: int) -> bool:
        """True when the sender wants the request back rather than so much KV computed here."""
        limit = request.message.max_recomputed_tokens
        return limit is not None and num_blocks * self._kv_cache.block_size > max(limit, 0) and num_blocks > 0

    def _resume(self, request: Request, load: Load, damaged_blocks: tuple[int, ...]) -> None:
        """Keep and publish the valid blocks, and leave the rest to be computed."""
        num_recomputed = set_computed(
            request,
            load,
            damaged_blocks,
            block_size=self._kv_cache.block_size,
            # A step computes one span of a request: without chunked prefill there must be one span only.
            only_damaged=self._config.recompute_damaged_only and self._config.enable_chunked_prefill,
        )
        num_local_tokens = load.first_block * self._kv_cache.block_size
        request.num_cached_tokens = request.num_computed_before(request.num_prompt_tokens)
        request.num_remote_tokens = max(request.num_cached_tokens - num_local_tokens, 0)
        self._counters.remote_hit_tokens += max(load.valid_length - num_local_tokens - num_recomputed, 0)
        self._counters.recomputed_tokens += num_recomputed
        if self._kv_cache.enable_prefix_caching:
            self._step_output.publish_loaded(request)

    def _fail(self, request: Request, reason: str, *, num_failed: int, code: str = "kv_load_failed") -> None:
        message = f"{num_failed} KV blocks of the prompt could not be loaded: {reason}"
        self._live_requests.finish(request)
        self._live_requests.report(request, FinishReason.ERROR, error=RequestError(code=code, message=message))
