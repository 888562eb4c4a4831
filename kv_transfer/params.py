"""The wire types of the hand-over. A change here bumps ``PROTOCOL_VERSION`` and adds a line to its history."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.cache_groups import GroupBlocks

PROTOCOL_VERSION = 4
"""Version of every type in this file.

1: plain hand-over: handshake, lease, READ, done with acknowledgement.
2: ``checksums`` are the 64-bit XXH3 of each block's bytes, unless the source makes none.
3: streamed hand-over: ``KVStreamParams``; ``epoch`` ties blocks that were read early to the lease that confirms them.
4: KV cache groups: ``block_ids`` and ``checksums`` by group, of each the last blocks that its window needs.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerIdentity:
    """Who an engine is: its name, and which life of it (a restart has a new incarnation)."""

    engine_id: str
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What two engines tell each other when they meet, in both directions.

    ``layout_hash`` and ``protocol_version`` are compared before ``agent_metadata`` (opaque to all but the
    transport) is looked at. ``base_address``, ``num_blocks``, ``block_bytes``, ``memory`` and ``device_index``
    describe the sender's KV region.
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

    ``block_ids`` are the prefill engine's blocks in prompt order, one tuple a KV cache group. Those of a group that
    sees every token cover ``num_tokens`` tokens, the last of them perhaps in part; those of a group with a window are
    the last of as many, all that the last of these tokens sees. ``checksums`` has one number a block. ``epoch`` is that
    of the announcements of these blocks: what was read of one of them under another epoch is void. 0: none were
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

    The source announces them under the id of the request. What was read so counts only once ``KVTransferParams`` of
    the same request confirmed it; if those do not come within ``timeout_s`` the reader frees what it read.
    """

    protocol_version: int
    source: PeerIdentity
    timeout_s: float
