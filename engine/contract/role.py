"""The role of a worker pool, as a record of everything in which pools differ. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from engine.contract.messages import LoadReport


class Work(StrEnum):
    """The kinds of work that a request makes: its prompt is computed, then its stream of tokens is generated.

    There are two of them, however many roles there are.
    """

    PROMPT = "prompt"
    STREAM = "stream"


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

    prefers: the kinds of work that the pool is for, each once. Its workers take no other where roles are fixed.
    measure: how the load of its workers is measured: pools that follow their load scale by it, and the routing policy
        ``prefix`` weighs it against cached tokens.
    policy: the routing policy for its workers, if the configuration names none.
    prompt_share: the least time of a step that prompts get unless they have time to spare, as a share of the step's
        time without them, whatever latency its streams were promised.
    is_elastic: its workers take any work.
    """

    name: str
    prefers: tuple[Work, ...]
    measure: LoadMeasure
    policy: str
    prompt_share: float
    is_elastic: bool = False

    def elastic(self) -> Role:
        """This role where any worker takes any work."""
        return replace(self, is_elastic=True)

    def takes(self, work: Work) -> bool:
        """True if its workers do this kind of work."""
        return self.is_elastic or work in self.prefers

    @property
    def decodes(self) -> bool:
        """True if its workers decode. Then they use CUDA graphs for decode steps, and may compute prompts that are
        almost entirely in their cache.
        """
        return self.takes(Work.STREAM)

    @property
    def leans_to_prompts(self) -> float:
        """How much its workers prefer prompts to streams: 1 for prompts alone, 0 for streams alone, 0.5 for both."""
        return self.prefers.count(Work.PROMPT) / len(self.prefers)

    def is_followed_by(self, other: Role) -> bool:
        """True if the live requests of a drained worker of this role go on at workers of the other one."""
        return self.decodes and other.decodes

    @property
    def moves_out(self) -> bool:
        """True when a drained worker's live requests move to another worker of the same role."""
        return self.is_followed_by(self)

    def meets(self, other: Role) -> bool:
        """True when workers of both roles read KV from each other, in either direction: whoever decodes may go on with
        what any other worker computed.
        """
        return self.decodes or other.decodes
