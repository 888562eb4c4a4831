"""The placement of a request as a whole: where its tokens are generated, and where its prompt is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.contract.role import Work
from router.placement.reason import Reason
from router.pool.demand import Demand
from router.pool.pool import ReplicaPool
from router.pool.replica import Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPlan:
    """The ids of replicas that could compute a prompt and generate after it, with the predictions for that plan.

    ``num_head_tokens``: how many tokens of a split prompt the first one computes; 0: no split.
    """

    prompt: str
    stream: str
    ttft_s: float
    cost: float
    num_head_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The replicas chosen for a request. ``stream`` generates. ``prompt`` computes the prompt; None if that is decided
    later.

    ``num_prompt_tokens`` of the prompt are not in the cache of ``prompt``. If the prompt is split, ``prompt`` computes
    only its first ``num_head_tokens``, whose uncached tokens ``num_prompt_tokens`` counts, and ``stream`` computes the
    rest; 0: no split. ``num_prompt_blocks`` are reserved where the prompt is computed, if that is another replica.

    ``weighed`` are the cheapest plans, the chosen one first; only set for traced requests.
    """

    stream: Replica
    prompt: Replica | None = None
    num_prompt_tokens: int = 0
    num_head_tokens: int = 0
    num_prompt_blocks: int = 0
    reason: Reason | None = None
    weighed: Sequence[NamedPlan] = ()

    @property
    def is_colocated(self) -> bool:
        """True if one replica does both."""
        return self.prompt is self.stream


class Placement(Protocol):
    """Places requests on the replicas of a pool."""

    def place(self, demand: Demand, *, num_blocks: int) -> Placed | None:
        """Where a request goes that needs so many blocks; None while no replica has room."""


class PolicyPlacement:
    """Places by the pool's policy alone. A replica whose role is for prompts too computes this one; otherwise who
    computes it is chosen later, when its turn comes.
    """

    def __init__(self, pool: ReplicaPool) -> None:
        self._pool = pool

    def place(self, demand: Demand, *, num_blocks: int) -> Placed | None:
        """Where a request goes that needs so many blocks; None while no replica has room."""
        replica = self._pool.choose(demand, work=Work.STREAM, num_blocks=num_blocks, must_fit=True)
        if replica is None or not replica.prefers(Work.PROMPT):
            return None if replica is None else Placed(stream=replica)
        num_prompt_tokens = max(demand.num_tokens - self._pool.num_cached_tokens(replica, demand), 1)
        return Placed(stream=replica, prompt=replica, num_prompt_tokens=num_prompt_tokens, reason=Reason.COLOCATED)
