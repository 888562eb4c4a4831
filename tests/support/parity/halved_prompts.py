"""A placement that splits every prompt that may be split: by predictions that only happens if a worker is busy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from router.placement.reason import Reason
from router.pool.demand import Demand
from router.pool.placing import Placed, Placement
from router.pool.pool import ReplicaPool
from router.service import RouterService


class HalvedPrompts:
    """One worker computes the first half of a prompt, another one the rest and the tokens; ``inner`` places all other
    requests.
    """

    def __init__(self, inner: Placement, pool: ReplicaPool, *, head: str, tail: str) -> None:
        self._inner = inner
        self._pool = pool
        self._head, self._tail = head, tail

    def place(self, demand: Demand, *, num_blocks: int) -> Placed | None:
        """The placement of a request."""
        head, tail = self._pool.get(self._head), self._pool.get(self._tail)
        num_tokens = demand.num_tokens // 2
        if not (demand.may_be_split and num_tokens and head and tail and head.takes_requests and tail.takes_requests):
            return self._inner.place(demand, num_blocks=num_blocks)
        return Placed(
            stream=tail, prompt=head, num_prompt_tokens=num_tokens, num_head_tokens=num_tokens, reason=Reason.SPLIT
        )


@contextmanager
def halved_prompts(service: RouterService, *, head: str, tail: str) -> Iterator[None]:
    """Inside the block prompts are split between these two workers of a service with elastic roles."""
    admission = service._orchestrator._admission
    inner = admission._placement
    admission._placement = HalvedPrompts(inner, service.decode_pool, head=head, tail=tail)
    try:
        yield
    finally:
        admission._placement = inner
