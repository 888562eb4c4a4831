"""Which full blocks of prompts are being computed or loaded right now, and by whom. Free of torch.

A block is published only when its step has returned. Until then a second request with the same prompt would compute it
again; instead it waits for whoever computes it, and finds it in the cache. A burst of prompts with a common prefix
computes that prefix once, and damaged blocks that several requests share are recomputed once. Likewise a prompt
that several requests bring along, as the choices of one request do, is loaded once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.contract.block_hash import BlockHash
from engine.scheduler.requests.request import Request, RequestState


class PendingPrefixes:
    """Content that an admitted request is going to publish."""

    def __init__(self) -> None:
        self._owner: dict[BlockHash, Request] = {}

    def __len__(self) -> int:
        return len(self._owner)

    def claim(self, request: Request, block_size: int) -> None:
        """A request that has its blocks is about to compute, or loads, what is not published of its known tokens.

        Whoever computes goes before whoever loads.
        """
        owner, hashes, confirmed = self._owner, request.block_hashes, request.confirmed_blocks
        for index in range(request.num_published_blocks, request.num_tokens // block_size):
            if index not in confirmed:
                known = owner.setdefault(hashes[index], request)
                if known.state is RequestState.LOADING and request.state is not RequestState.LOADING:
                    owner[hashes[index]] = request

    def is_computed_by_other(self, block_hash: BlockHash, request: Request) -> bool:
        """True when another request computes this content now."""
        owner = self._owner.get(block_hash)
        return owner is not None and owner is not request and owner.state is not RequestState.LOADING

    def is_loaded_by_other(self, block_hash: BlockHash, request: Request) -> bool:
        """True when another request's load brings this content."""
        owner = self._owner.get(block_hash)
        return owner is not None and owner is not request and owner.state is RequestState.LOADING

    def published(self, block_hashes: Iterable[BlockHash]) -> None:
        """These contents can be found: nobody is going to bring them any more."""
        owner = self._owner
        if owner:
            for block_hash in block_hashes:
                owner.pop(block_hash, None)

    def withdraw(self, request: Request) -> None:
        """A request stops computing: whoever waits for it goes ahead.

        All its blocks are looked at: what it has published so far does not say what it claims.
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
