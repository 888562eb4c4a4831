"""What an engine's scheduler asks of a connector: one Protocol for each question.

All of it is called from the engine's thread only, and no call blocks: what is to be done is queued, and goes to the
worker's half with the orders of the step. Who supplies KV implements the Protocols whose questions it can answer:
what moves blocks between engines is a ``KVSource``, a ``KVProducer`` and a ``KVConsumer``; what keeps evicted blocks is
a ``KVSource`` and an ``EvictionTier``.

Source of the words: vLLM's KV connectors have the roles kv_producer and kv_consumer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kv_transfer.cache_groups import GroupBlocks
from kv_transfer.params import KVStreamParams, KVTransferParams

NO_ADDRESS: Final = b""
"""Stands for the address of a block that need not be supplied."""


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
        """Say what can be supplied beyond the local prefix; None means "not known yet, ask again".

        ``num_prompt_tokens`` are the tokens known so far: with those that were generated elsewhere before a move.
        ``block_hashes`` address, by KV cache group, the full blocks that the request may take from a cache, from its
        first block on. Of a group with a window the blocks suffice that the token behind the match sees. A block at
        NO_ADDRESS need not be supplied: it is in the cache, though not of all groups.
        """

    def begin_load(
        self, *, request_id: str, params: KVTransferParams | None, first_block: int, block_ids: GroupBlocks
    ) -> None:
        """Queue the load of blocks from the ``first_block``-th one of the request on, equally many of each group.

        Absent ones are not loaded: those before a group's window, and those that are in the cache. It takes up what
        the last ``match`` offered to this request; nothing was matched since.
        """

    def cancel_load(self, request_id: str) -> None:
        """The request ended while loading; its ``LoadEnded`` still comes. Unknown ids are ignored."""


class KVProducer(Protocol):
    """How do peers get what was computed here?"""

    @property
    def can_stream(self) -> bool:
        """True when prompts can be handed over while they are computed: when ``announce`` does something."""

    def announce(self, *, request_id: str, first_block: int, block_ids: GroupBlocks) -> None:
        """Full blocks of a prompt that will be handed over are computed, from the ``first_block``-th on.

        Those are absent that the lease will not cover, because they will have left the window of their group.
        They stay as they are, and held, until ``grant_lease`` or ``withdraw`` of this request.
        """

    def withdraw(self, request_id: str) -> None:
        """The blocks announced for a request are given up: whoever read them must not use them."""

    def grant_lease(self, *, request_id: str, block_ids: GroupBlocks, num_tokens: int) -> KVTransferParams:
        """Pin a finished request's blocks for a reader; ``LeaseEnded`` says when to free them.

        Each group's ``block_ids`` are the last of those that hold ``num_tokens`` tokens.
        """

    def abort_lease(self, request_id: str) -> None:
        """End the lease of a request now; ``LeaseEnded`` follows. Unknown ids are ignored."""


class KVConsumer(Protocol):
    """What becomes of the hand-overs that requests bring along, and of prompts that a peer still computes?"""

    @property
    def can_stream(self) -> bool:
        """True when prompts can be read while they are computed: when ``begin_stream`` may do something."""

    def expect(self, params: KVTransferParams) -> None:
        """A request with this hand-over waits here: keep its lease until its load, ``release`` or ``pass_on``."""

    def pass_on(self, params: KVTransferParams) -> None:
        """A request that waited here goes on elsewhere: its lease is kept alive from there, or ends by itself."""

    def release(self, params: KVTransferParams) -> None:
        """This engine will not read these blocks (any more): let the peer's lease end."""

    def begin_stream(
        self, *, stream_id: str, request_id: str, params: KVStreamParams, first_block: int, block_ids: GroupBlocks
    ) -> bool:
        """Begin to read the blocks that a peer announces, from the ``first_block``-th one of the prompt on.

        Nothing of it counts before ``load_streamed`` took it over. False: this cannot be streamed; nothing was begun.
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
        """Queue a load that takes over a stream with the same destination, and reads only what is missing.

        ``match`` was asked without ``block_hashes``, so that all of the load comes from the peer.
        """

    def cancel_stream(self, stream_id: str) -> bool:
        """Stop a stream that no load took over.

        Returns:
            True when nothing writes its destination from now on; else ``ended_streams`` says when.
        """


class EvictionTier(Protocol):
    """What becomes of the blocks that the prefix cache gives up?"""

    def keep_evicted(self, block_ids: Sequence[int], block_hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Keep the content of blocks that will be written again, as far as there is room.

        It is copied before the next step computes or loads anything.

        Returns:
            What cannot be found here any more: the content that is not kept, older content that made room, and content
            that was lost since the last call.
        """

    def keeps(self, block_hash: bytes) -> bool:
        """True when this content can be found here."""

    def forget_evicted(self) -> int:
        """The prefix cache was reset: offer nothing that was kept until now. Returns how many blocks that were."""
