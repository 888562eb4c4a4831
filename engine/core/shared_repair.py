"""Blocks that a loaded request misses and somebody else has computed meanwhile: take those instead (K4)."""

from __future__ import annotations

from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request, Span


def first_missing_block(request: Request, block_size: int) -> int:
    """Index of the first block that a request with blocks but without a row has to compute."""
    start = request.holes[0].start if request.holes else request.num_computed_tokens
    return start // block_size


def adopt_published_blocks(request: Request, kv_cache: KVCacheManager) -> int:
    """Replace missing blocks by published ones of the same content; the last token stays to be computed.

    Returns:
        How many blocks need no computing any more.
    """
    block_size = kv_cache.block_size
    num_adopted = 0
    remaining: list[Span] = []
    for hole in request.holes:
        for start in range(hole.start, hole.end, block_size):
            if _adopt(request, start // block_size, kv_cache):
                num_adopted += 1
            elif remaining and remaining[-1].end == start:
                remaining[-1] = Span(remaining[-1].start, start + block_size)
            else:
                remaining.append(Span(start, start + block_size))
    request.holes = remaining
    frontier = request.num_computed_tokens
    while frontier % block_size == 0 and frontier + block_size < request.num_tokens:
        if not _adopt(request, frontier // block_size, kv_cache):
            break
        frontier += block_size
        num_adopted += 1
    request.num_computed_tokens = frontier
    if num_adopted:
        request.num_published_blocks = first_missing_block(request, block_size)
    return num_adopted


def _adopt(request: Request, index: int, kv_cache: KVCacheManager) -> bool:
    published = kv_cache.lookup(request.block_hashes[index : index + 1])
    if not published:
        return False
    kv_cache.hold(published)
    kv_cache.release([request.block_ids[index]])
    request.block_ids[index] = published[0]
    request.confirmed_blocks.add(index)
    return True
