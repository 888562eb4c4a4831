"""Where a request's tokens are generated, and where its prompt is computed, when that is decided together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from router.placement.reason import Reason
from router.pool.demand import Demand
from router.pool.pool import ReplicaPool
from router.pool.replica import Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPlan:
    """Replicas by id that could compute a prompt and generate behind it, and what is predicted of that.

    ``num_head_tokens``: of a prompt that is split, what the former computes; 0: it is not.
    """

    prompt: str
    stream: str
    ttft_s: float
    cost: float
    num_head_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """``stream`` generates. ``prompt`` computes the prompt, of which it lacks ``num_prompt_tokens``; None where that is
    decided later. Of a prompt that is split, ``prompt`` computes only the first ``num_head_tokens``, of which it lacks
    so many, and ``stream`` the others; 0: it is not split. ``num_prompt_blocks`` are promised to the prompt where it is
    computed, if that is elsewhere.

    ``weighed`` are the plans that cost least, the chosen one first; there for traced requests only.
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
        """True when one replica does both."""
        return self.prompt is self.stream


class Placement(Protocol):
    """Chooses for requests among the replicas of a pool."""

    def place(self, demand: Demand, *, num_blocks: int) -> Placed | None:
        """Where a request goes that needs so many blocks; None while no replica has room."""


class PolicyPlacement:
    """By the policy of the pool alone. Whoever computes the prompt is chosen when its turn comes."""

    def __init__(self, pool: ReplicaPool) -> None:
        self._pool = pool

    def place(self, demand: Demand, *, num_blocks: int) -> Placed | None:
        """Where a request goes that needs so many blocks; None while no replica has room."""
        replica = self._pool.choose(demand, num_blocks=num_blocks, must_fit=True)
        return None if replica is None else Placed(stream=replica)
