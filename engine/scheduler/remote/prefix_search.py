"""Which KV of a waiting request exists already: first in the cache here, then at a source. Free of torch."""

from __future__ import annotations

from engine.contract.block_hash import BlockHash
from engine.scheduler.blocks.block_need import BlockNeed, CachedPrefix
from engine.scheduler.blocks.kv_cache_manager import KVCacheManager
from engine.scheduler.remote.loads import RemoteKV
from engine.scheduler.requests.request import Request
from kv_transfer.protocols import RemoteMatch


class PrefixSearch:
    """Looks a prefix up in the cache, then asks the source for the rest."""

    def __init__(self, kv_cache: KVCacheManager, remote: RemoteKV) -> None:
        self._kv_cache = kv_cache
        self._remote = remote

    def local(self, request: Request) -> CachedPrefix:
        """The longest cached prefix, without the last token, which is always computed."""
        return self._kv_cache.prefix(self._shareable_hashes(request), looks_behind=self._remote.can_load)

    def match(self, request: Request, local: CachedPrefix) -> RemoteMatch | None:
        """What the source supplies beyond the cached prefix; None when it does not know yet."""
        num_local_tokens = local.num_blocks * self._kv_cache.block_size
        return self._remote.match(request, num_local_tokens, local)

    def num_known_tokens(self, request: Request) -> int | None:
        """How many tokens the cache or the source can supply; None when the source does not know yet."""
        local = self.local(request)
        match = self.match(request, local)
        if match is None:
            return None
        return min(local.num_blocks * self._kv_cache.block_size + match.num_tokens, request.num_tokens)

    def need(self, request: Request, local: CachedPrefix, *, start: int) -> BlockNeed:
        """The blocks that a request must hold to begin computing at position ``start``.

        Blocks between the prefix and ``start`` that are cached are not loaded.
        """
        return self._kv_cache.needs.need(local, start=start, num_tokens=request.num_tokens, behind=local.behind)

    def _shareable_hashes(self, request: Request) -> list[BlockHash]:
        """Addresses of the full blocks that could be found instead of computed."""
        if not self._kv_cache.enable_prefix_caching:
            return []
        block_size = self._kv_cache.block_size
        hashes = request.hashes(block_size)
        if request.num_prompt_logprobs is not None:
            return []
        return hashes[: (request.num_tokens - 1) // block_size]
