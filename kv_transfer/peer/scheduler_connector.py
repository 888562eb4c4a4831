"""The scheduler's half of every connector that reads from peers: what may be loaded, and the queue of orders."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain

from kv_transfer.cache_groups import ABSENT_BLOCK, GroupBlocks, block_place
from kv_transfer.connector import NO_ORDERS, ConnectorOrders, LoadOrder, StreamOrder
from kv_transfer.layout import KVLayout
from kv_transfer.memory.block_memory import BlockMemory
from kv_transfer.params import PROTOCOL_VERSION, KVStreamParams, KVTransferParams, PeerIdentity
from kv_transfer.peer.announcements import Announced, Announcements
from kv_transfer.peer.lease import LeaseTable
from kv_transfer.protocols import RemoteMatch
from kv_transfer.stream_gate import StreamGate

logger = logging.getLogger(f"baton.{__name__}")

_NOTHING = RemoteMatch(num_tokens=0)
_NUM_REMEMBERED_LEASES = 65_536


class PeerSchedulerConnector:
    """Implements ``KVSource``, ``KVProducer`` and ``KVConsumer``. Free of torch and of any transport.

    One lease serves one load. Once that load began, or the lease was released, it supplies nothing more. So a request
    that was preempted after its load computes its prompt again, or finds it in the prefix cache. With ``memory``
    hand-overs carry checksums. Without ``announcements`` nothing is streamed, in either direction.
    """

    def __init__(
        self,
        *,
        identity: PeerIdentity,
        layout: KVLayout,
        leases: LeaseTable,
        memory: BlockMemory | None = None,
        announcements: Announcements | None = None,
    ) -> None:
        self._identity = identity
        self._layout = layout
        self._groups = layout.cache_groups
        self._leases = leases
        self._memory = memory
        self._announcements = announcements
        self._loads: list[LoadOrder] = []
        self._cancelled: list[str] = []
        self._releases: list[KVTransferParams] = []
        self._expected: list[KVTransferParams] = []
        self._passed_on: list[KVTransferParams] = []
        self._streams: list[StreamOrder] = []
        self._cancelled_streams: list[str] = []
        self._gates: dict[str, StreamGate] = {}
        self._spent: OrderedDict[str, None] = OrderedDict()

    @property
    def can_stream(self) -> bool:
        """True when streaming is configured."""
        return self._announcements is not None

    def expect(self, params: KVTransferParams) -> None:
        """Keep the lease of a waiting request alive, if its blocks can be used."""
        if params.lease_id not in self._spent and self._why_unusable(params) is None:
            self._expected.append(params)

    def pass_on(self, params: KVTransferParams) -> None:
        """Stop keeping a lease alive, because its request goes on at another engine."""
        self._passed_on.append(params)

    def match(
        self,
        *,
        request_id: str,
        params: KVTransferParams | None,
        num_prompt_tokens: int,
        num_local_tokens: int,
        block_hashes: Sequence[Sequence[bytes]] = (),  # noqa: ARG002  (what peers hand over is found by lease)
    ) -> RemoteMatch | None:
        """Say how many tokens can be supplied beyond the local prefix. Never None: the answer is in the params."""
        if params is None or params.lease_id in self._spent:
            return _NOTHING
        reason = self._why_unusable(params)
        if reason is not None:
            logger.warning("hand-over not usable: request_id=%s reason=%s", request_id, reason)
            return _NOTHING
        end = min(params.num_tokens, num_prompt_tokens)
        if end <= num_local_tokens or not self._has_window(params, min(end, num_prompt_tokens - 1), num_local_tokens):
            return _NOTHING
        return RemoteMatch(num_tokens=end - num_local_tokens)

    def _has_window(self, params: KVTransferParams, position: int, num_local_tokens: int) -> bool:
        """True when hand-over and local prefix together have, for every group, the blocks that ``position`` sees."""
        num_blocks = self._groups.num_blocks_for(params.num_tokens)
        num_local_blocks = num_local_tokens // self._layout.block_size
        return all(
            num_blocks - len(block_ids) <= max(self._groups.first_block(group, position), num_local_blocks)
            for group, block_ids in enumerate(params.block_ids)
        )

    def begin_load(
        self, *, request_id: str, params: KVTransferParams | None, first_block: int, block_ids: GroupBlocks
    ) -> None:
        """Queue the read of blocks from the ``first_block``-th one of the prompt on, by group."""
        assert params is not None, "nothing but a hand-over is offered here"
        self._queue_load(request_id=request_id, params=params, first_block=first_block, block_ids=block_ids)

    def load_streamed(
        self,
        *,
        stream_id: str,
        request_id: str,
        params: KVTransferParams,
        first_block: int,
        block_ids: GroupBlocks,
    ) -> None:
        """Queue the read of the blocks that a stream with the same destination has not read yet."""
        del self._gates[stream_id]
        self._queue_load(
            request_id=request_id, params=params, first_block=first_block, block_ids=block_ids, stream_id=stream_id
        )

    def _queue_load(
        self,
        *,
        request_id: str,
        params: KVTransferParams,
        first_block: int,
        block_ids: GroupBlocks,
        stream_id: str | None = None,
    ) -> None:
        source_block_ids, ours, checksums = self._pair(params, first_block, block_ids)
        self._spend(params.lease_id)
        if request_id in self._cancelled:
            self._cancelled.remove(request_id)  # it was meant for an earlier load, which has ended
        self._loads.append(
            LoadOrder(
                request_id=request_id,
                params=params,
                source_block_ids=source_block_ids,
                block_ids=ours,
                checksums=checksums,
                stream_id=stream_id,
            )
        )

    def _pair(
        self, params: KVTransferParams, first_block: int, block_ids: GroupBlocks
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]:
        """The peer's blocks, our blocks, and the checksums of the peer's blocks, in the order of the prompt."""
        num_blocks = self._groups.num_blocks_for(params.num_tokens)
        starts = [num_blocks - len(theirs) for theirs in params.block_ids]
        wanted = [
            (group, first_block + index - starts[group], block_id)
            for index, column in enumerate(zip(*block_ids, strict=True))
            for group, block_id in enumerate(column)
            if block_id != ABSENT_BLOCK
        ]
        assert all(0 <= index < len(params.block_ids[group]) for group, index, _ in wanted), (
            "the scheduler asked for blocks beyond the hand-over"
        )
        checksums = params.checksums
        return (
            tuple(params.block_ids[group][index] for group, index, _ in wanted),
            tuple(block_id for _, _, block_id in wanted),
            None if checksums is None else tuple(checksums[group][index] for group, index, _ in wanted),
        )

    def _flat(self, first_block: int, block_ids: GroupBlocks) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Places and ids of the blocks that are not absent, in the order of the prompt."""
        num_groups = self._groups.num_groups
        flat = [
            (block_place(first_block + index, group, num_groups), block_id)
            for index, column in enumerate(zip(*block_ids, strict=True))
            for group, block_id in enumerate(column)
            if block_id != ABSENT_BLOCK
        ]
        return tuple(place for place, _ in flat), tuple(block_id for _, block_id in flat)

    def begin_stream(
        self, *, stream_id: str, request_id: str, params: KVStreamParams, first_block: int, block_ids: GroupBlocks
    ) -> bool:
        """Queue a stream; False when we cannot read from this peer."""
        if self._announcements is None or params.protocol_version != PROTOCOL_VERSION:
            return False
        if params.source.engine_id == self._identity.engine_id:
            return False
        gate = self._gates[stream_id] = StreamGate()
        places, flat = self._flat(first_block, block_ids)
        self._streams.append(
            StreamOrder(
                stream_id=stream_id,
                request_id=request_id,
                params=params,
                places=places,
                block_ids=flat,
                gate=gate,
            )
        )
        return True

    def cancel_stream(self, stream_id: str) -> bool:
        """Close a stream's gate; True when no read of it was under way."""
        self._cancelled_streams.append(stream_id)
        return self._gates.pop(stream_id).close()

    def announce(self, *, request_id: str, first_block: int, block_ids: GroupBlocks) -> None:
        """Announce computed blocks to the reader, if there is one."""
        if self._announcements is None:
            return
        places, flat = self._flat(first_block, block_ids)
        if flat:
            self._announcements.announce(request_id, places=places, block_ids=flat)

    def withdraw(self, request_id: str) -> None:
        """Tell the reader, if there is one, that the announced blocks are void."""
        if self._announcements is not None:
            self._announcements.withdraw(request_id)

    def cancel_load(self, request_id: str) -> None:
        """The request ended while loading; the worker's half ignores ids that it does not load."""
        self._cancelled.append(request_id)

    def release(self, params: KVTransferParams) -> None:
        """Let the peer's lease end. Does nothing if the lease's load began, or if it was already released."""
        if params.lease_id in self._spent:
            return
        self._spend(params.lease_id)
        if params.source.engine_id != self._identity.engine_id:
            self._releases.append(params)
        elif params.source == self._identity:
            self._leases.abort(params.lease_id)

    def grant_lease(self, *, request_id: str, block_ids: GroupBlocks, num_tokens: int) -> KVTransferParams:
        """Pin a finished request's blocks for a reader."""
        flat = tuple(chain.from_iterable(block_ids))
        announced = Announced()
        if self._announcements is not None:
            announced = self._announcements.finish(request_id, flat)
        lease = self._leases.grant(request_id=request_id, block_ids=flat)
        checksums: GroupBlocks | None = None
        if self._memory is not None:
            missing = [block_id for block_id in flat if block_id not in announced.checksums]
            known = dict(announced.checksums) | dict(zip(missing, self._memory.checksums(missing), strict=True))
            checksums = tuple(tuple(known[block_id] for block_id in group) for group in block_ids)
        return KVTransferParams(
            protocol_version=PROTOCOL_VERSION,
            source=self._identity,
            lease_id=lease.lease_id,
            layout_hash=self._layout.layout_hash,
            block_ids=block_ids,
            num_tokens=num_tokens,
            checksums=checksums,
            epoch=announced.epoch,
        )

    def abort_lease(self, request_id: str) -> None:
        """End the leases of a request now; unknown ids are ignored."""
        self._leases.abort_request(request_id)

    def take_orders(self) -> ConnectorOrders:
        """Hand over what was queued since the last call."""
        orders = ConnectorOrders(
            loads=tuple(self._loads),
            cancelled_loads=tuple(self._cancelled),
            releases=tuple(self._releases),
            expected=tuple(self._expected),
            passed_on=tuple(self._passed_on),
            streams=tuple(self._streams),
            cancelled_streams=tuple(self._cancelled_streams),
        )
        if orders.is_empty:
            return NO_ORDERS
        self._loads.clear()
        self._cancelled.clear()
        self._releases.clear()
        self._expected.clear()
        self._passed_on.clear()
        self._streams.clear()
        self._cancelled_streams.clear()
        return orders

    def _why_unusable(self, params: KVTransferParams) -> str | None:
        if params.protocol_version != PROTOCOL_VERSION:
            return f"protocol version {params.protocol_version}, ours is {PROTOCOL_VERSION}"
        if params.layout_hash != self._layout.layout_hash:
            return f"layout {params.layout_hash}, ours is {self._layout.layout_hash}"
        if params.source.engine_id == self._identity.engine_id:
            return "its source is this engine itself: what is left of it is in its own prefix cache"
        groups, num_blocks = self._groups, self._groups.num_blocks_for(params.num_tokens)
        counts = [len(block_ids) for block_ids in params.block_ids]
        if len(counts) != groups.num_groups:
            return f"blocks of {len(counts)} KV cache groups, ours are {groups.num_groups}"
        for group, count in enumerate(counts):
            num_needed = num_blocks - groups.first_block(group, params.num_tokens - 1)
            if not num_needed <= count <= num_blocks:
                return f"{count} blocks of group {group} for {params.num_tokens} tokens, {num_needed} are needed"
        if params.checksums is not None and [len(checksums) for checksums in params.checksums] != counts:
            return "not as many checksums as blocks"
        return None

    def _spend(self, lease_id: str) -> None:
        self._spent[lease_id] = None
        while len(self._spent) > _NUM_REMEMBERED_LEASES:
            self._spent.popitem(last=False)
