"""The scheduler's half of a chain: sources that are asked in order, and tiers that all keep what is evicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kv_transfer.cache_groups import GroupBlocks, held_blocks
from kv_transfer.connector import NO_ORDERS, ConnectorOrders
from kv_transfer.params import KVTransferParams
from kv_transfer.protocols import EvictionTier, KVConsumer, KVSource, RemoteMatch

_NOTHING: Final = RemoteMatch(num_tokens=0)


class ChainSource:
    """Implements ``KVSource``: each source is asked for what those before it do not have.

    Parts lie behind each other in the order of the sources; one that does not end with a full block is the last. Only
    ``sources[peer_source]`` can load a hand-over, and ``consumer`` is told of those that it need not load.
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
        """Offer what the sources have together; None as soon as one of them does not know yet."""
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
        """Give each source its part, and the peer source what is left; a hand-over that is not needed is released.

        A part of which nothing is needed, because the parts behind it fill all windows, is not loaded.
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
        """Each source ignores what it does not load."""
        for source in self.sources:
            source.cancel_load(request_id)


class ChainTier:
    """Implements ``EvictionTier``: every tier keeps what is evicted, as far as it has room.

    So the tiers know nothing of each other, and nothing is copied from one to the next. LMCache, too, stores a block to
    all of its backends.
    """

    def __init__(self, tiers: Sequence[EvictionTier]) -> None:
        self._tiers = tuple(tiers)

    def keep_evicted(self, block_ids: Sequence[int], block_hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Have all tiers keep it; lost is what no tier has."""
        lost: dict[bytes, None] = {}
        for tier in self._tiers:
            lost.update(dict.fromkeys(tier.keep_evicted(block_ids, block_hashes)))
        return tuple(block_hash for block_hash in lost if not self.keeps(block_hash))

    def keeps(self, block_hash: bytes) -> bool:
        """True when a tier has this content."""
        return any(tier.keeps(block_hash) for tier in self._tiers)

    def forget_evicted(self) -> int:
        """Have all tiers forget; what several of them kept counts with each."""
        return sum(tier.forget_evicted() for tier in self._tiers)


def chain_orders(queues: Sequence[Callable[[], ConnectorOrders]]) -> Callable[[], ConnectorOrders]:
    """What takes the orders of all sources at once, in the order of the sources."""

    def take_orders() -> ConnectorOrders:
        parts = tuple(take() for take in queues)
        return NO_ORDERS if all(part.is_empty for part in parts) else ConnectorOrders(parts=parts)

    return take_orders
