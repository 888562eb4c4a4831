"""The role of a worker pool, as a record of everything in which pools differ. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from engine.contract.messages import LoadReport


class LoadMeasure(StrEnum):
    """What makes a worker count as busy; the values are also names of routing policies."""

    QUEUED_TOKENS = "queued_tokens"
    KV_USAGE = "kv_usage"

    def of(self, load: LoadReport) -> float:
        """The measure of one worker: prompt tokens waiting there, or the share of its KV blocks in use."""
        return load.queued_prefill_tokens if self is LoadMeasure.QUEUED_TOKENS else load.kv_usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A role of workers. Its ``name`` is also that of its Serve deployment, its configuration section and its metrics
    label.

    Every engine can do everything. A role says what a pool is meant for, and its workers report it as a value.

    measure: how the load of its workers is measured: pools that follow their load scale by it, and the routing policy
        ``prefix`` weighs it against cached tokens.
    policy: the routing policy for its workers, if the configuration names none.
    hands_over_to: the roles whose workers continue what a worker of this role computed, after the prompt or when the
        worker drains. Workers of roles that hand over to each other connect to each other.
    decodes: its workers usually decode. So they use CUDA graphs for decode steps, and may compute prompts that are
        almost entirely in their cache.
    prompt_share: the least time of a step that prompts get, as a share of the step's time without them, whatever
        latency its streams were promised.
    """

    name: str
    measure: LoadMeasure
    policy: str
    hands_over_to: tuple[str, ...]
    decodes: bool
    prompt_share: float

    def elastic(self, roles: Iterable[str]) -> Role:
        """This role where any worker takes any work: its workers hand over to those of all ``roles``, and decode."""
        return replace(self, hands_over_to=tuple(roles), decodes=True)

    @property
    def others_take_over(self) -> bool:
        """True when workers of other roles also take live requests from a drained one."""
        return self.moves_out and len(self.hands_over_to) > 1

    @property
    def moves_out(self) -> bool:
        """True when a drained worker's live requests move to another worker of the same role."""
        return self.name in self.hands_over_to

    def meets(self, other: Role) -> bool:
        """True when workers of both roles read KV from each other, in either direction."""
        return other.name in self.hands_over_to or self.name in other.hands_over_to
