"""The prefix cache's index: which published block holds which content. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from engine.contract.block_hash import BlockHash
from kv_transfer.cache_groups import ABSENT_BLOCK


class PrefixIndex:
    """Maps content to at most one block, and each block to at most one content."""

    def __init__(self, num_blocks: int) -> None:
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: list[BlockHash | None] = [None] * num_blocks

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._block_of

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._block_of)

    def block_of(self, block_hash: BlockHash) -> int | None:
        """The block with this content, if one is published."""
        return self._block_of.get(block_hash)

    def hash_of(self, block_id: int) -> BlockHash | None:
        """The content under which a block is published, None for an unpublished one."""
        return self._hash_of[block_id]

    def longest_prefix(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The blocks of the longest cached prefix of a chain."""
        blocks: list[int] = []
        find = self._block_of.get
        for block_hash in hashes:
            block_id = find(block_hash)
            if block_id is None:
                break
            blocks.append(block_id)
        return blocks

    def publish(self, block_id: int, block_hash: BlockHash) -> bool:
        """Publish a block under its content; False when the content or the block is published already."""
        if block_hash in self._block_of or self._hash_of[block_id] is not None:
            return False
        self._block_of[block_hash] = block_id
        self._hash_of[block_id] = block_hash
        return True

    def publish_each(self, block_ids: Sequence[int], hashes: Sequence[BlockHash]) -> list[int]:
        """Publish blocks under their contents; skip absent blocks, and contents or blocks that are published already.

        Returns:
            The indices of the blocks published now.
        """
        block_of, hash_of = self._block_of, self._hash_of
        published: list[int] = []
        for at, (block_id, block_hash) in enumerate(zip(block_ids, hashes, strict=True)):
            if block_hash not in block_of and block_id != ABSENT_BLOCK and hash_of[block_id] is None:
                block_of[block_hash] = block_id
                hash_of[block_id] = block_hash
                published.append(at)
        return published

    def withdraw(self, block_ids: Iterable[int]) -> list[BlockHash]:
        """Withdraw published blocks; returns the contents that they had."""
        hash_of, block_of = self._hash_of, self._block_of
        withdrawn: list[BlockHash] = []
        for block_id in block_ids:
            block_hash = hash_of[block_id]
            assert block_hash is not None, f"block {block_id} is not published"
            hash_of[block_id] = None
            del block_of[block_hash]
            withdrawn.append(block_hash)
        return withdrawn

    def clear(self) -> None:
        """Withdraw every block."""
        for block_id in self._block_of.values():
            self._hash_of[block_id] = None
        self._block_of.clear()
