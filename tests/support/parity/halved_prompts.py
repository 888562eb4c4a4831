"""A placement that splits every prompt that may be split: predictions would do it only where somebody is busy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from router.placement.reason import Reason
from router.pool.demand import Demand
from router.pool.placing import Placed, Placement
from router.pool.pool import ReplicaPool
from router.service import RouterService


class HalvedPrompts:
    """The first half is computed by one worker, the rest and the tokens by another; ``inner`` places all others."""

    def __init__(self, inner: Placement, pool: ReplicaPool, *, head: str, tail: str) -> None:
        self._inner = inner
        self._pool = pool
        self._head, self._tail = head, tail

    def place(self, demand: Demand, *, num_blocks: int) -> Placed | None:
        """Where a request goes."""
        head, tail = self._pool.get(self._head), self._pool.get(self._tail)
        num_tokens = demand.num_tokens // 2
        if not (demand.may_be_split and num_tokens and head and tail and head.takes_requests and tail.takes_requests):
            return self._inner.place(demand, num_blocks=num_blocks)
        return Placed(
            stream=tail, prompt=head, num_prompt_tokens=num_tokens, num_head_tokens=num_tokens, reason=Reason.SPLIT
        )


@contextmanager
def halved_prompts(service: RouterService, *, head: str, tail: str) -> Iterator[None]:
    """In here prompts are split between these two workers of a service whose roles are elastic."""
    admission = service._orchestrator._admission
    inner = admission._placement
    admission._placement = HalvedPrompts(inner, service.decode_pool, head=head, tail=tail)
    try:
        yield
    finally:
        admission._placement = inner
