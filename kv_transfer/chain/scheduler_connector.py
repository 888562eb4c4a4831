"""The scheduler's half of a chain: each source is asked for what those before it do not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kv_transfer.cache_groups import GroupBlocks, held_blocks
from kv_transfer.connector import NO_ORDERS, ConnectorOrders, RemoteMatch, SchedulerConnector
from kv_transfer.params import KVStreamParams, KVTransferParams

_NOTHING: Final = RemoteMatch(num_tokens=0)


def _slice(block_ids: GroupBlocks, start: int, end: int) -> GroupBlocks:
    return tuple(group[start:end] for group in block_ids)


class ChainSchedulerConnector:
    """Implements ``SchedulerConnector``. Owned by the engine's thread.

    Parts lie behind each other in the order of the sources; one that does not end with a full block is the last.
    Leases are granted by the ``peer_source``-th source, and the ``tier``-th keeps what is evicted.
    """

    def __init__(
        self, sources: Sequence[SchedulerConnector], *, block_size: int, peer_source: int, tier: int | None
    ) -> None:
        self.sources = tuple(sources)
        self._block_size = block_size
        self._peer_source = self.sources[peer_source]
        self._tier = self.sources[tier] if tier is not None else None
        self._plan: list[tuple[SchedulerConnector, int]] = []

    @property
    def can_stream(self) -> bool:
        """True when the peer source can."""
        return self._peer_source.can_stream

    def expect(self, params: KVTransferParams) -> None:
        """Every source may know what to do with it."""
        for source in self.sources:
            source.expect(params)

    def pass_on(self, params: KVTransferParams) -> None:
        """Every source ignores what it does not keep alive."""
        for source in self.sources:
            source.pass_on(params)

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
        self,
        *,
        request_id: str,
        params: KVTransferParams | None,
        first_block: int,
        block_ids: GroupBlocks,
        stream_id: str | None = None,
    ) -> None:
        """Give each source its part, and the peer source what is left; a hand-over that no part needs is released.

        A part of which nothing is needed, because the parts behind it fill all windows, is not loaded.
        """
        if stream_id is not None:
            self._plan = []
        used: list[SchedulerConnector] = []
        begin, end = first_block, first_block + max(map(len, block_ids))
        for source, end_block in self._plan:
            part = _slice(block_ids, begin - first_block, min(end_block, end) - first_block)
            if held_blocks(part):
                source.begin_load(request_id=request_id, params=params, first_block=begin, block_ids=part)
                used.append(source)
            begin = max(begin, min(end_block, end))
        if begin < end:
            self._peer_source.begin_load(
                request_id=request_id,
                params=params,
                first_block=begin,
                block_ids=_slice(block_ids, begin - first_block, end - first_block),
                stream_id=stream_id,
            )
            used.append(self._peer_source)
        self._plan = []
        if params is not None:
            for source in self.sources:
                if source not in used:
                    source.release(params)

    def begin_stream(
        self, *, stream_id: str, request_id: str, params: KVStreamParams, first_block: int, block_ids: GroupBlocks
    ) -> bool:
        """Let the peer source read from its peer."""
        return self._peer_source.begin_stream(
            stream_id=stream_id, request_id=request_id, params=params, first_block=first_block, block_ids=block_ids
        )

    def cancel_stream(self, stream_id: str) -> bool:
        """Stop the peer source's stream."""
        return self._peer_source.cancel_stream(stream_id)

    def announce(self, *, request_id: str, first_block: int, block_ids: GroupBlocks) -> None:
        """Let the peer source tell its peers."""
        self._peer_source.announce(request_id=request_id, first_block=first_block, block_ids=block_ids)

    def withdraw(self, request_id: str) -> None:
        """Let the peer source tell its peers."""
        self._peer_source.withdraw(request_id)

    def cancel_load(self, request_id: str) -> None:
        """Each source ignores what it does not load."""
        for source in self.sources:
            source.cancel_load(request_id)

    def release(self, params: KVTransferParams) -> None:
        """The source that knows the lease lets it end."""
        for source in self.sources:
            source.release(params)

    def keep_evicted(self, block_ids: Sequence[int], block_hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Let the tier have the blocks; without one all of it is lost."""
        return block_hashes if self._tier is None else self._tier.keep_evicted(block_ids, block_hashes)

    def forget_evicted(self) -> int:
        """Let the tier forget."""
        return 0 if self._tier is None else self._tier.forget_evicted()

    def grant_lease(self, *, request_id: str, block_ids: GroupBlocks, num_tokens: int) -> KVTransferParams:
        """Have the peer source pin blocks for a reader."""
        return self._peer_source.grant_lease(request_id=request_id, block_ids=block_ids, num_tokens=num_tokens)

    def abort_lease(self, request_id: str) -> None:
        """End the peer source's lease."""
        self._peer_source.abort_lease(request_id)

    def take_orders(self) -> ConnectorOrders:
        """The orders of each source, in the order of the sources."""
        parts = tuple(source.take_orders() for source in self.sources)
        return NO_ORDERS if all(part.is_empty for part in parts) else ConnectorOrders(parts=parts)
