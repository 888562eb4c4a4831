"""What an engine's scheduler asks of a connector: one Protocol for each question.

Only the engine's thread calls these methods, and no call blocks. Work is queued, and goes to the worker's half with the
orders of the step. A source of KV implements the Protocols whose questions it can answer. A connector that moves blocks
between engines is a ``KVSource``, a ``KVProducer`` and a ``KVConsumer``. A tier, which keeps evicted blocks, is a
``KVSource`` and an ``EvictionTier``.

Source of the words: vLLM's KV connectors have the roles kv_producer and kv_consumer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kv_transfer.cache_groups import GroupBlocks
from kv_transfer.params import KVStreamParams, KVTransferParams

NO_ADDRESS: Final = b""
"""Placeholder for the hash of a block that need not be supplied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteMatch:
    """How many tokens beyond the local prefix a source can supply. Every load is asynchronous."""

    num_tokens: int


class KVSource(Protocol):
    """Which KV of a prompt can be loaded instead of being computed?"""

    def match(
        self,
        *,
        request_id: str,
        params: KVTransferParams | None,
        num_prompt_tokens: int,
        num_local_tokens: int,
        block_hashes: Sequence[Sequence[bytes]] = (),
    ) -> RemoteMatch | None:
        """Say how many tokens can be supplied beyond the local prefix; None means "not known yet, ask again".

        ``num_prompt_tokens`` counts all known tokens, including those generated at another worker before a move.
        ``block_hashes`` are, for each KV cache group, the hashes of the full blocks that the request may take from a
        cache, from its first block on. For a group with a window, only the blocks that the token after the match sees
        are needed. A block with NO_ADDRESS need not be supplied: this group's block is already in the local cache.
        """

    def begin_load(
        self, *, request_id: str, params: KVTransferParams | None, first_block: int, block_ids: GroupBlocks
    ) -> None:
        """Queue the load of blocks from the request's ``first_block``-th one on, the same number for each group.

        Absent blocks are not loaded: they lie before a group's window, or are already in the cache. The load is the one
        that the last ``match`` offered to this request; no other ``match`` may come between.
        """

    def cancel_load(self, request_id: str) -> None:
        """Cancel the load of a request that ended. Its ``LoadEnded`` still comes. Unknown ids are ignored."""


class KVProducer(Protocol):
    """How do peers get what was computed here?"""

    @property
    def can_stream(self) -> bool:
        """True when prompts can be handed over while they are computed. Otherwise ``announce`` has no effect."""

    def announce(self, *, request_id: str, first_block: int, block_ids: GroupBlocks) -> None:
        """Announce that full blocks of a prompt are computed, from the ``first_block``-th on.

        Blocks that will have left their group's window are absent: the lease will not cover them. The caller keeps the
        announced blocks held and unchanged until ``grant_lease`` or ``withdraw`` for this request.
        """

    def withdraw(self, request_id: str) -> None:
        """Take back the blocks announced for a request: a reader that already has them must not use them."""

    def grant_lease(self, *, request_id: str, block_ids: GroupBlocks, num_tokens: int) -> KVTransferParams:
        """Pin a finished request's blocks for a reader; ``LeaseEnded`` says when to free them.

        ``block_ids`` holds, for each group, the last of the blocks that cover ``num_tokens`` tokens.
        """

    def abort_lease(self, request_id: str) -> None:
        """End the lease of a request now; ``LeaseEnded`` follows. Unknown ids are ignored."""


class KVConsumer(Protocol):
    """What happens to the hand-overs that arrive with requests, and to prompts that a peer still computes?"""

    @property
    def can_stream(self) -> bool:
        """True when prompts can be read while they are computed. Otherwise ``begin_stream`` always returns False."""

    def expect(self, params: KVTransferParams) -> None:
        """Keep the lease of a waiting request alive until its KV is loaded, or until ``release`` or ``pass_on``."""

    def pass_on(self, params: KVTransferParams) -> None:
        """Stop renewing a lease, since its request goes on at another engine. That engine renews it, or it expires."""

    def release(self, params: KVTransferParams) -> None:
        """Let the peer's lease end: this engine will not read these blocks, or is done with them."""

    def begin_stream(
        self, *, stream_id: str, request_id: str, params: KVStreamParams, first_block: int, block_ids: GroupBlocks
    ) -> bool:
        """Begin to read the blocks that a peer announces, from the prompt's ``first_block``-th one on.

        No block counts before ``load_streamed`` takes the stream over. False: this prompt cannot be streamed, and
        nothing was begun.
        """

    def load_streamed(
        self,
        *,
        stream_id: str,
        request_id: str,
        params: KVTransferParams,
        first_block: int,
        block_ids: GroupBlocks,
    ) -> None:
        """Queue a load that takes over a stream with the same destination, and reads only the missing blocks.

        The caller called ``match`` without ``block_hashes``, so the whole load comes from the peer.
        """

    def cancel_stream(self, stream_id: str) -> bool:
        """Stop a stream that no load took over.

        Returns:
            True when nothing writes its destination from now on. Otherwise ``ended_streams`` reports when that is so.
        """


class EvictionTier(Protocol):
    """What happens to the blocks that the prefix cache evicts?"""

    def keep_evicted(self, block_ids: Sequence[int], block_hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Keep the content of evicted blocks, as far as there is room. The blocks themselves will be reused.

        The content is copied before the next step computes or loads anything.

        Returns:
            Hashes of content that cannot be found here any more: content that was not kept, older content that made
            room, and content that was lost since the last call.
        """

    def keeps(self, block_hash: bytes) -> bool:
        """True when this content can be found here."""

    def forget_evicted(self) -> int:
        """Forget all kept blocks, because the prefix cache was reset. Returns how many blocks were forgotten."""
