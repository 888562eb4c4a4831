"""Loads of KV from other engines and tiers: what to ask for, what is in flight, and what an ended load leaves.

A loading request is kept here, and costs the scheduler nothing until the event that its load ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from engine.scheduler.blocks.block_need import CachedPrefix
from engine.scheduler.requests.request import Request, RequestState, Span
from engine.scheduler.requests.row_table import NEVER
from kv_transfer.cache_groups import ABSENT_BLOCK, BlockTables, held_blocks
from kv_transfer.connector import LoadEnded
from kv_transfer.params import KVTransferParams
from kv_transfer.protocols import KVConsumer, KVSource, RemoteMatch

NOTHING_REMOTE: Final = RemoteMatch(num_tokens=0)


@dataclass(slots=True)
class Load:
    """A load in flight: blocks ``first_block`` to ``end_block`` (exclusive) of the request's tables.

    ``shared`` blocks were in the cache: the load does not write them.
    """

    request: Request
    block_tables: BlockTables
    first_block: int
    end_block: int
    num_tokens: int
    shared: frozenset[int] = frozenset()
    is_wanted: bool = True

    @property
    def num_blocks(self) -> int:
        """How many blocks it fills: those of each table, times the number of tables."""
        return (self.end_block - self.first_block) * len(self.block_tables)

    @property
    def valid_length(self) -> int:
        """Tokens that need no computing if all goes well. The last known token is always computed."""
        return min(self.num_tokens, self.request.num_tokens - 1)


class LoadOutcome(Enum):
    """What a ``LoadEnded`` event meant."""

    UNKNOWN = auto()
    ABANDONED = auto()
    COMPLETE = auto()
    DAMAGED = auto()


@dataclass(frozen=True, slots=True)
class EndedLoad:
    """A load that ended. ``damaged_blocks`` are ascending indices of blocks that are damaged in at least one group.

    A block that holds only the last token is not among them: that token is computed in any case.
    """

    outcome: LoadOutcome
    load: Load | None = None
    damaged_blocks: tuple[int, ...] = ()


class RemoteKV:
    """The loads in flight, and the hand-overs that requests bring along.

    ``source`` loads KV, and ``consumer`` keeps track of hand-overs; an engine that loads nothing has neither.
    """

    def __init__(self, source: KVSource | None, consumer: KVConsumer | None, *, num_groups: int = 1) -> None:
        self._source = source
        self._consumer = consumer
        self._num_groups = num_groups
        self._loads: dict[str, Load] = {}
        self._gaps: Counter[int] = Counter()
        self.num_loading = 0
        self.num_loading_blocks = 0
        """Blocks of each table that are being filled, times the number of tables; abandoned loads included."""

    @property
    def can_load(self) -> bool:
        """True when there is a source to load from."""
        return self._source is not None

    @property
    def has_loads(self) -> bool:
        """True while any load is in flight, wanted or not."""
        return bool(self._loads)

    def is_open(self, request_id: str) -> bool:
        """True while a load with this id is in flight, wanted or not."""
        return request_id in self._loads

    def loading(self) -> list[Request]:
        """The requests whose loads are in flight and wanted."""
        return [load.request for load in self._loads.values() if load.is_wanted]

    @property
    def tightest_gap(self) -> int:
        """The shortest promised gap between tokens of any loading request, in microseconds; ``NEVER`` if none."""
        return min(self._gaps, default=NEVER)

    def abandoned_tables(self) -> list[list[int]]:
        """Blocks held only because an abandoned load may still write them, by load."""
        return [held_blocks(load.block_tables) for load in self._loads.values() if not load.is_wanted]

    def expect(self, params: KVTransferParams) -> None:
        """Have the peer keep a hand-over whose request waits here."""
        if self._consumer is not None:
            self._consumer.expect(params)

    def pass_on(self, request: Request) -> KVTransferParams | None:
        """The hand-over of a request that goes on elsewhere, if it has one; this engine stops keeping track of it."""
        params, request.kv_transfer = request.kv_transfer, None
        if params is not None and self._consumer is not None:
            self._consumer.pass_on(params)
        return params

    def wanted_load(self, request_id: str) -> Load | None:
        """The load in flight that this request waits for, if any."""
        load = self._loads.get(request_id)
        return load if load is not None and load.is_wanted else None

    def match(self, request: Request, num_local_tokens: int, local: CachedPrefix | None = None) -> RemoteMatch | None:
        """What the source supplies beyond the local prefix; None when it does not know yet.

        ``local`` tells what a tier need not supply; without it, tiers are not asked. If nothing is supplied, the caller
        that starts the request releases its hand-over.
        """
        is_enough = num_local_tokens >= request.num_tokens - 1
        if self._source is None or is_enough or request.is_load_lost or self.is_open(request.request_id):
            return NOTHING_REMOTE
        match = self._source.match(
            request_id=request.request_id,
            params=request.kv_transfer,
            num_prompt_tokens=request.num_tokens,
            num_local_tokens=num_local_tokens,
            block_hashes=() if local is None else local.addresses(self._num_groups),
        )
        return match if match is None or match.num_tokens > 0 else NOTHING_REMOTE

    def begin(
        self,
        request: Request,
        *,
        num_local_blocks: int,
        num_tokens: int,
        block_size: int,
        stream_id: str | None = None,
        shared: frozenset[int] = frozenset(),
    ) -> None:
        """Load a request's tokens from block ``num_local_blocks`` up to ``num_tokens``, except ``shared`` blocks.

        ``stream_id`` names the stream that is already writing these blocks.
        """
        assert self._source is not None
        assert self._consumer is not None
        end_block = -(-num_tokens // block_size)
        block_ids = tuple(tuple(table[num_local_blocks:end_block]) for table in request.block_tables)
        if shared:
            block_ids = tuple(
                tuple(ABSENT_BLOCK if block_id in shared else block_id for block_id in table) for table in block_ids
            )
        if stream_id is None:
            self._source.begin_load(
                request_id=request.request_id,
                params=request.kv_transfer,
                first_block=num_local_blocks,
                block_ids=block_ids,
            )
        else:
            assert request.kv_transfer is not None, "what is taken over was handed over"
            self._consumer.load_streamed(
                stream_id=stream_id,
                request_id=request.request_id,
                params=request.kv_transfer,
                first_block=num_local_blocks,
                block_ids=block_ids,
            )
        request.kv_transfer = None
        request.state = RequestState.LOADING
        assert request.request_id not in self._loads, "a load under this id is in flight"
        self._loads[request.request_id] = Load(
            request, request.block_tables, num_local_blocks, end_block, num_tokens, shared
        )
        self.num_loading_blocks += self._loads[request.request_id].num_blocks
        self._gaps[request.promised_gap] += 1
        self.num_loading += 1

    def _leave(self, request: Request) -> None:
        """The request no longer waits for its load."""
        self.num_loading -= 1
        gap = request.promised_gap
        if self._gaps[gap] == 1:
            del self._gaps[gap]
        else:
            self._gaps[gap] -= 1

    def abandon(self, request: Request) -> None:
        """Mark the request's load as unwanted; its destination stays held until it ends (known-failures 4)."""
        load = self._loads[request.request_id]
        load.is_wanted = False
        self._leave(request)
        assert self._source is not None
        self._source.cancel_load(request.request_id)

    def end(self, event: LoadEnded, *, block_size: int) -> EndedLoad:
        """Close a load. ``outcome`` tells late, duplicate and unknown events apart."""
        load = self._loads.pop(event.request_id, None)
        if load is None:
            return EndedLoad(LoadOutcome.UNKNOWN)
        self.num_loading_blocks -= load.num_blocks
        if not load.is_wanted:
            return EndedLoad(LoadOutcome.ABANDONED, load)
        self._leave(load.request)
        failed = set(event.failed_block_ids)
        end_block = min(load.end_block, -(-load.valid_length // block_size))
        damaged = tuple(
            index
            for index in range(load.first_block, end_block)
            if any(table[index] in failed for table in load.block_tables)
        )
        return EndedLoad(LoadOutcome.DAMAGED if damaged else LoadOutcome.COMPLETE, load, damaged)

    def release(self, request: Request) -> None:
        """Let the peer end its lease: this engine will not read the request's hand-over."""
        if request.kv_transfer is not None:
            self.release_params(request.kv_transfer)
            request.kv_transfer = None

    def release_params(self, params: KVTransferParams) -> None:
        """Let the peer end this hand-over's lease."""
        if self._consumer is not None:
            self._consumer.release(params)


def set_computed(request: Request, load: Load, damaged: Iterable[int], *, block_size: int, only_damaged: bool) -> int:
    """Record which positions of a loaded request are computed, and which invalid spans must be computed.

    Returns:
        How many loaded tokens must be computed again.
    """
    valid_length = load.valid_length
    invalid_spans: list[Span] = []
    for index in damaged:
        start, end = index * block_size, min((index + 1) * block_size, valid_length)
        if invalid_spans and invalid_spans[-1].end == start:
            start = invalid_spans.pop().start
        invalid_spans.append(Span(start, end))
    num_recomputed = sum(invalid_span.end - invalid_span.start for invalid_span in invalid_spans)
    if invalid_spans and not only_damaged:
        num_recomputed = valid_length - invalid_spans[0].start
        valid_length = invalid_spans[0].start
        invalid_spans = []
    elif invalid_spans and invalid_spans[-1].end == valid_length:
        valid_length = invalid_spans.pop().start
    request.invalid_spans = invalid_spans
    request.num_computed_tokens = valid_length
    return num_recomputed
