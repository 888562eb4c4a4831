"""Which full blocks of prompts are being computed or loaded now, and by which request. Free of torch.

A block is published only when its step has returned. Until then a second request with the same prompt would compute it
again. Instead it waits for the request that computes it, and then finds it in the cache. So a burst of prompts with a
common prefix computes that prefix once, and damaged blocks that several requests share are recomputed once. Likewise, a
prompt whose KV several requests bring along, such as the choices of one request, is loaded once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

from engine.contract.block_hash import BlockHash
from engine.scheduler.requests.request import Request, RequestState


class PendingPrefixes:
    """The contents that admitted requests are going to publish."""

    def __init__(self) -> None:
        self._owner: dict[BlockHash, Request] = {}

    def __len__(self) -> int:
        return len(self._owner)

    def claim(self, request: Request, block_size: int) -> None:
        """Claim the unpublished full blocks of an admitted request's known tokens, which it computes or loads.

        A claim by computing takes the place of a claim by loading.
        """
        owner, confirmed = self._owner, request.confirmed_blocks
        first, end = request.num_published_blocks, request.num_tokens // block_size
        hashes: Iterable[BlockHash] = islice(request.block_hashes, first, end)
        if confirmed:
            hashes = [block_hash for index, block_hash in enumerate(hashes, first) if index not in confirmed]
        for block_hash in hashes:
            known = owner.setdefault(block_hash, request)
            if (
                known is not request
                and known.state is RequestState.LOADING
                and request.state is not RequestState.LOADING
            ):
                owner[block_hash] = request

    def is_computed_by_other(self, block_hash: BlockHash, request: Request) -> bool:
        """True when another request is computing this content."""
        owner = self._owner.get(block_hash)
        return owner is not None and owner is not request and owner.state is not RequestState.LOADING

    def is_loaded_by_other(self, block_hash: BlockHash, request: Request) -> bool:
        """True when another request is loading this content."""
        owner = self._owner.get(block_hash)
        return owner is not None and owner is not request and owner.state is RequestState.LOADING

    def published(self, block_hashes: Iterable[BlockHash]) -> None:
        """Drop the claims on contents that were published."""
        owner = self._owner
        if owner:
            for block_hash in block_hashes:
                owner.pop(block_hash, None)

    def withdraw(self, request: Request) -> None:
        """Drop the claims of a request that stops computing, so that requests waiting for it go on.

        All its blocks are checked: what it has published so far does not tell what it claims.
        """
        if not self._owner:
            return
        for block_hash in request.block_hashes:
            if self._owner.get(block_hash) is request:
                del self._owner[block_hash]

    def check_integrity(self, live: Mapping[str, Request]) -> None:
        """Compare the claims with the requests that may own any (known-failures 26).

        Raises:
            AssertionError: A claim is left whose owner ended, waits, or has the block already.
        """
        for block_hash, owner in self._owner.items():
            name = owner.request_id
            assert live.get(name) is owner, f"{name} has ended, and whoever needs its prefix waits for it"
            assert not owner.is_waiting, f"{name} waits itself, and whoever needs its prefix waits for it"
            assert block_hash in owner.block_hashes, f"{name} claims a block that is none of its own"
            index = owner.block_hashes.index(block_hash)
            has_block = index < owner.num_published_blocks or index in owner.confirmed_blocks
            assert not has_block, f"{name} has block {index}, and will not bring it once more"
