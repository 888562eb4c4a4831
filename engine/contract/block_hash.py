"""Content addresses of full blocks: equal hashes mean equal tokens in equal context. Free of torch.

A hash covers the parent's hash, the block's token ids and, through the root, the keys that keep contexts apart.
It is the same in every process, so that a router can compute it too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Final, NewType, cast

import numpy as np
import xxhash

from engine.contract.step import IntArray

BlockHash = NewType("BlockHash", bytes)

KEY_BYTES: Final = 8
"""Routers know a block by the first bytes of its hash: half as long, and enough for a hint."""

_BYTES_PER_TOKEN: Final = 4
_HASH_BYTES: Final = 16
_hash_bytes = xxhash.xxh3_128_digest
_hash_block = cast("Callable[[bytes], BlockHash]", _hash_bytes)

NO_KEYS_ROOT: Final = BlockHash(_hash_bytes(b"baton block chain 1"))


def root_hash(extra_keys: Sequence[str] = ()) -> BlockHash:
    """The parent hash of a chain's first block. ``extra_keys`` (cache salt, adapter, ...) keep equal tokens apart."""
    if not extra_keys:
        return NO_KEYS_ROOT
    parts = [NO_KEYS_ROOT]
    for key in extra_keys:
        data = key.encode()
        parts.append(BlockHash(len(data).to_bytes(4, "little") + data))
    return BlockHash(_hash_bytes(b"".join(parts)))


def prompt_root(cache_salt: str | None) -> BlockHash:
    """The parent hash of a prompt's first block."""
    return root_hash((cache_salt,)) if cache_salt else NO_KEYS_ROOT


def hash_block(parent: BlockHash, token_bytes: bytes) -> BlockHash:
    """The address of the block after ``parent``; ``token_bytes`` are its token ids as little-endian int32."""
    return _hash_block(parent + token_bytes)


def hash_chain(parent: BlockHash, token_ids: IntArray, block_size: int) -> list[BlockHash]:
    """Addresses of all full blocks of ``token_ids``; the first block follows ``parent``."""
    num_tokens = len(token_ids) // block_size * block_size
    whole = np.ascontiguousarray(token_ids[:num_tokens], dtype="<i4")
    blocks: list[bytes] = whole.view(f"V{block_size * _BYTES_PER_TOKEN}").tolist()
    # One expression: a long prompt has thousands of blocks, and a NewType call costs a third of hashing a block.
    return [parent := _hash_block(parent + block) for block in blocks]


def group_hash(block_hash: BlockHash, group: int) -> BlockHash:
    """The address of one KV cache group's block of these tokens; in the first group it is ``block_hash`` itself."""
    return BlockHash(block_hash + group.to_bytes(2, "little")) if group else block_hash


def group_hashes(block_hashes: Sequence[BlockHash], num_groups: int) -> list[Sequence[BlockHash]]:
    """The addresses of the blocks of these tokens in every KV cache group, by group."""
    if num_groups == 1:
        return [block_hashes]
    return [[group_hash(block_hash, group) for block_hash in block_hashes] for group in range(num_groups)]


def is_first_group(block_hash: BlockHash) -> bool:
    """True for the address of a block of the first KV cache group."""
    return len(block_hash) == _HASH_BYTES


def block_key(block_hash: BlockHash) -> bytes:
    """The key by which routers know a block."""
    return block_hash[:KEY_BYTES]


def unpack_keys(keys: bytes) -> tuple[int, ...]:
    """Keys that were joined for the wire, as integers."""
    return struct.unpack(f"<{len(keys) // KEY_BYTES}Q", keys)


def prompt_keys(token_ids: IntArray, cache_salt: str | None, block_size: int) -> tuple[int, ...]:
    """The keys of all full blocks of a prompt, in order."""
    return unpack_keys(b"".join(map(block_key, hash_chain(prompt_root(cache_salt), token_ids, block_size))))
