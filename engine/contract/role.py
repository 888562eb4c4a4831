"""What a pool of workers is for, as a record: all that differs between pools. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from engine.contract.messages import LoadReport


class LoadMeasure(StrEnum):
    """By what a worker is busy; its values are also names of routing policies."""

    QUEUED_TOKENS = "queued_tokens"
    KV_USAGE = "kv_usage"

    def of(self, load: LoadReport) -> float:
        """The measure of one worker: prompt tokens that wait there, or the share of its KV blocks in use."""
        return load.queued_prefill_tokens if self is LoadMeasure.QUEUED_TOKENS else load.kv_usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A role, by whose ``name`` its Serve deployment, its section of the configuration and its label in metrics go.

    Every engine can do everything; a role says what a pool is meant for, and is a value that its workers report.

    measure: what its workers are busy by. A pool that follows its load scales by it, and the routing policy ``prefix``
        weighs it against what is cached.
    policy: the routing policy of its workers where the configuration names none.
    hands_over_to: roles whose workers go on with what a worker of this role computed, after its prompt or when it is
        drained. Workers of roles that hand over to each other meet.
    decodes: its workers make decode steps as a rule: these are worth CUDA graphs, and prompts that they nearly have in
        their cache may be computed there.
    prompt_share: of what a step takes without prompts, what it takes for them at least, whatever its streams were
        promised.
    """

    name: str
    measure: LoadMeasure
    policy: str
    hands_over_to: tuple[str, ...]
    decodes: bool
    prompt_share: float

    def elastic(self, roles: Iterable[str]) -> Role:
        """The role where any worker takes any work: its workers hand over to those of all ``roles``, and decode."""
        return replace(self, hands_over_to=tuple(roles), decodes=True)

    @property
    def others_take_over(self) -> bool:
        """True when workers of other roles, too, take live requests from one that is drained."""
        return self.moves_out and len(self.hands_over_to) > 1

    @property
    def moves_out(self) -> bool:
        """True when live requests leave a worker that is drained for another one of the same role."""
        return self.name in self.hands_over_to

    def meets(self, other: Role) -> bool:
        """True when workers of both roles read KV from each other, in either direction."""
        return other.name in self.hands_over_to or self.name in other.hands_over_to
