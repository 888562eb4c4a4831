"""The wire types of the hand-over. A change here bumps ``PROTOCOL_VERSION`` and adds a line to its history."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.cache_groups import GroupBlocks

PROTOCOL_VERSION = 4
"""Version of every type in this file.

1: plain hand-over: handshake, lease, READ, done with acknowledgement.
2: ``checksums`` are the 64-bit XXH3 of each block's bytes, unless the source makes none.
3: streamed hand-over: ``KVStreamParams``; ``epoch`` ties blocks that were read early to the lease that confirms them.
4: KV cache groups: ``block_ids`` and ``checksums`` by group; of each group only the last blocks, those in its window.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerIdentity:
    """An engine's name, and its incarnation: each restart gets a new one."""

    engine_id: str
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What two engines tell each other when they meet, in both directions.

    ``layout_hash`` and ``protocol_version`` are compared first. Only then does the transport read ``agent_metadata``,
    which is opaque to everything else. ``base_address``, ``num_blocks``, ``block_bytes``, ``memory`` and
    ``device_index`` describe the sender's KV region.
    """

    protocol_version: int
    identity: PeerIdentity
    layout_hash: str
    layout_description: str
    base_address: int
    num_blocks: int
    block_bytes: int
    memory: str
    device_index: int
    agent_metadata: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferParams:
    """Where the KV of a prompt lies, and the lease under which it may be read.

    ``block_ids`` are the prefill engine's blocks in prompt order, one tuple per KV cache group. For a group without a
    window they cover all ``num_tokens`` tokens; the last block may be partly filled. For a group with a window they are
    only the last blocks, those that the last token sees. ``checksums`` has one number per block. ``epoch`` is the one
    under which these blocks were announced: a block that was read under another epoch is void. 0: no block was
    announced.
    """

    protocol_version: int
    source: PeerIdentity
    lease_id: str
    layout_hash: str
    block_ids: GroupBlocks
    num_tokens: int
    checksums: GroupBlocks | None = None
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVStreamParams:
    """Where the KV of a prompt is being computed now, so that its blocks can be read as they become complete.

    The source announces blocks under the request's id. Blocks that were read early count only once the
    ``KVTransferParams`` of the same request confirm them. If these do not arrive within ``timeout_s``, the reader
    frees the blocks.
    """

    protocol_version: int
    source: PeerIdentity
    timeout_s: float
