"""The scheduler's half of a chain: it asks sources in order, and lets all tiers keep evicted blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kv_transfer.cache_groups import GroupBlocks, held_blocks
from kv_transfer.connector import NO_ORDERS, ConnectorOrders
from kv_transfer.params import KVTransferParams
from kv_transfer.protocols import EvictionTier, KVConsumer, KVSource, RemoteMatch

_NOTHING: Final = RemoteMatch(num_tokens=0)


class ChainSource:
    """Implements ``KVSource``: each source is asked only for the tokens after those that earlier sources supply.

    The parts of a load follow each other in the order of the sources. A part that does not end with a full block is the
    last one. Only ``sources[peer_source]`` can load a hand-over; ``consumer`` releases hand-overs that are not needed.
    """

    def __init__(self, sources: Sequence[KVSource], *, peer_source: int, consumer: KVConsumer, block_size: int) -> None:
        self.sources = tuple(sources)
        self._peer_source = self.sources[peer_source]
        self._consumer = consumer
        self._block_size = block_size
        self._plan: list[tuple[KVSource, int]] = []

    def match(
        self,
        *,
        request_id: str,
        params: KVTransferParams | None,
        num_prompt_tokens: int,
        num_local_tokens: int,
        block_hashes: Sequence[Sequence[bytes]] = (),
    ) -> RemoteMatch | None:
        """Offer the tokens that all sources can supply together; None as soon as one source does not know yet."""
        self._plan = []
        end = num_local_tokens
        for source in self.sources:
            match = source.match(
                request_id=request_id,
                params=params,
                num_prompt_tokens=num_prompt_tokens,
                num_local_tokens=end,
                block_hashes=block_hashes,
            )
            if match is None:
                self._plan = []
                return None
            if match.num_tokens > 0:
                end += match.num_tokens
                self._plan.append((source, -(-end // self._block_size)))
            if end % self._block_size:
                break
        if not self._plan:
            return _NOTHING
        return RemoteMatch(num_tokens=end - num_local_tokens)

    def begin_load(
        self, *, request_id: str, params: KVTransferParams | None, first_block: int, block_ids: GroupBlocks
    ) -> None:
        """Give each source its part, and the peer source the rest. A hand-over that is not needed is released.

        A part is not loaded if none of its blocks is needed, because later parts fill all windows.
        """
        is_handed_over = False
        begin, end = first_block, first_block + max(map(len, block_ids))
        for source, end_block in (*self._plan, (self._peer_source, end)):
            part = tuple(group[begin - first_block : min(end_block, end) - first_block] for group in block_ids)
            if held_blocks(part):
                source.begin_load(request_id=request_id, params=params, first_block=begin, block_ids=part)
                is_handed_over |= source is self._peer_source
            begin = max(begin, min(end_block, end))
        self._plan = []
        if params is not None and not is_handed_over:
            self._consumer.release(params)

    def cancel_load(self, request_id: str) -> None:
        """Cancel the load at all sources; a source ignores loads that it does not have."""
        for source in self.sources:
            source.cancel_load(request_id)


class ChainTier:
    """Implements ``EvictionTier``: every tier keeps evicted blocks, as far as it has room.

    So the tiers are independent, and nothing is copied from one to the next. LMCache, too, stores a block to all of its
    backends.
    """

    def __init__(self, tiers: Sequence[EvictionTier]) -> None:
        self._tiers = tuple(tiers)

    def keep_evicted(self, block_ids: Sequence[int], block_hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Let all tiers keep the blocks; content is lost when no tier has it."""
        lost: dict[bytes, None] = {}
        for tier in self._tiers:
            lost.update(dict.fromkeys(tier.keep_evicted(block_ids, block_hashes)))
        return tuple(block_hash for block_hash in lost if not self.keeps(block_hash))

    def keeps(self, block_hash: bytes) -> bool:
        """True when a tier has this content."""
        return any(tier.keeps(block_hash) for tier in self._tiers)

    def forget_evicted(self) -> int:
        """Let all tiers forget their blocks. A block that several tiers kept is counted for each of them."""
        return sum(tier.forget_evicted() for tier in self._tiers)


def chain_orders(queues: Sequence[Callable[[], ConnectorOrders]]) -> Callable[[], ConnectorOrders]:
    """A function that takes the orders of all sources, in the order of the sources."""

    def take_orders() -> ConnectorOrders:
        parts = tuple(take() for take in queues)
        return NO_ORDERS if all(part.is_empty for part in parts) else ConnectorOrders(parts=parts)

    return take_orders
