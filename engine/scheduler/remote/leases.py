"""Leases: blocks of finished requests that a peer may still read. Free of torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from engine.scheduler.requests.request import Request
from kv_transfer.cache_groups import BlockTables, held_blocks
from kv_transfer.connector import LeaseEnded
from kv_transfer.params import KVTransferParams
from kv_transfer.protocols import KVProducer


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedBlocks:
    """The blocks pinned by one lease."""

    request_id: str
    lease_id: str
    block_ids: list[int]


class BlockLeases:
    """Which lease pins which blocks; each lease ends once, and its blocks are given back once."""

    def __init__(self, producer: KVProducer | None) -> None:
        self._producer = producer
        self.by_id: dict[str, LeasedBlocks] = {}
        """To be read only."""
        self._num_of_request: Counter[str] = Counter()
        self._num_leases_of: Counter[int] = Counter()

    @property
    def num_leased_blocks(self) -> int:
        """Blocks that leases hold; a block held by several leases counts once."""
        return len(self._num_leases_of)

    def tables(self) -> list[list[int]]:
        """The block tables that leases hold."""
        return [lease.block_ids for lease in self.by_id.values()]

    def grant(self, request: Request, tables: BlockTables, *, num_tokens: int) -> KVTransferParams:
        """Pin blocks of a finished request until ``end`` gives them back.

        ``tables`` hold, by group, the needed ones among the blocks of the first ``num_tokens`` tokens: the last ones.
        """
        assert self._producer is not None, "a request without a connector cannot be handed over"
        block_ids = held_blocks(tables)
        assert len(block_ids) == sum(map(len, tables)), f"{request.request_id} lacks blocks that it hands over"
        params = self._producer.grant_lease(
            request_id=request.request_id, block_ids=tuple(map(tuple, tables)), num_tokens=num_tokens
        )
        self.by_id[params.lease_id] = LeasedBlocks(
            request_id=request.request_id, lease_id=params.lease_id, block_ids=block_ids
        )
        self._num_of_request[request.request_id] += 1
        self._num_leases_of.update(block_ids)
        return params

    def abort(self, request_id: str) -> bool:
        """Ask the producer to end a finished request's leases; False when it has none. Blocks stay until the end."""
        if not self._num_of_request[request_id] or self._producer is None:
            return False
        self._producer.abort_lease(request_id)
        return True

    def end(self, event: LeaseEnded) -> list[int] | None:
        """Close a lease and return its blocks; None when it is unknown or was closed before."""
        lease = self.by_id.pop(event.lease_id, None)
        if lease is None:
            return None
        self._num_of_request[lease.request_id] -= 1
        if not self._num_of_request[lease.request_id]:
            del self._num_of_request[lease.request_id]
        for block_id in lease.block_ids:
            self._num_leases_of[block_id] -= 1
            if not self._num_leases_of[block_id]:
                del self._num_leases_of[block_id]
        return lease.block_ids
