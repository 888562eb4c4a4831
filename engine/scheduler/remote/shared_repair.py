"""Blocks that a loaded request misses but another request has computed meanwhile: use those instead."""

from __future__ import annotations

from engine.scheduler.blocks.kv_cache_manager import KVCacheManager
from engine.scheduler.blocks.pending_prefixes import PendingPrefixes
from engine.scheduler.requests.request import Request, Span
from kv_transfer.cache_groups import ABSENT_BLOCK


def first_missing_block(request: Request, block_size: int) -> int:
    """Index of the first block that must be computed, for a request that has blocks but no row."""
    start = request.invalid_spans[0].start if request.invalid_spans else request.num_computed_tokens
    return start // block_size


def adopt_published_blocks(request: Request, kv_cache: KVCacheManager, pending: PendingPrefixes) -> int:
    """Replace missing blocks by published ones of the same content.

    The last token is still computed. Where a group has a window, so is the last block that is held of it: later blocks
    are appended only once computing has begun. No claims on adopted blocks are left, since they are published.

    Returns:
        How many blocks need no computing any more.
    """
    block_size = kv_cache.block_size
    num_adopted = 0
    remaining: list[Span] = []
    for invalid_span in request.invalid_spans:
        for start in range(invalid_span.start, invalid_span.end, block_size):
            if _adopt(request, start // block_size, kv_cache, pending):
                num_adopted += 1
            elif remaining and remaining[-1].end == start:
                remaining[-1] = Span(remaining[-1].start, start + block_size)
            else:
                remaining.append(Span(start, start + block_size))
    request.invalid_spans = remaining
    valid_length = request.num_computed_tokens
    end = min(request.num_tokens, min(map(len, request.block_tables)) * block_size)
    while valid_length % block_size == 0 and valid_length + block_size < end:
        if not _adopt(request, valid_length // block_size, kv_cache, pending):
            break
        valid_length += block_size
        num_adopted += 1
    request.num_computed_tokens = valid_length
    if num_adopted:
        request.num_published_blocks = first_missing_block(request, block_size)
    return num_adopted


def _adopt(request: Request, index: int, kv_cache: KVCacheManager, pending: PendingPrefixes) -> bool:
    tables = request.block_tables
    found = kv_cache.find_column(request.block_hashes[index])
    published: list[int] = []
    for table, block_id in zip(tables, found, strict=True):
        if block_id is None or index >= len(table) or table[index] == ABSENT_BLOCK:
            return False
        published.append(block_id)
    pending.published((request.block_hashes[index],))
    kv_cache.hold(published)
    kv_cache.release([table[index] for table in tables])
    for table, block_id in zip(tables, published, strict=True):
        table[index] = block_id
    request.confirmed_blocks.add(index)
    return True
