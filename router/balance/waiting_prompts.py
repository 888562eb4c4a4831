"""The choice of prompts that wait at one worker and should be computed by another: a pure function of what is known.

A prompt is placed when it comes. What was predicted then is off by what came since, from other routers too, and those
whose promise is lost are passed by others: so one worker has nothing to do while prompts wait at the next one. Source
of the idea: Eager, Lazowska, Zahorjan, "Adaptive load sharing in homogeneous distributed systems" (1986).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine.contract.step_time import StepTimeModel
from router.balance.moves import PlannedMove
from router.balance.streams import MoveReason

MARGIN = 1.25
LEAST_GAIN_S = 0.1
"""A prompt is moved if all that waits at its worker takes at least ``MARGIN`` times as long as all that waits at the
other one, the prompt included, and ``LEAST_GAIN_S`` more: what is predicted is not that certain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptQueue:
    """The prompt tokens that a worker has still to compute. ``num_late_tokens`` of them are of prompts that wait and
    whose promise is lost: those that are in time pass them.

    ``may_take``: more may come. Not to a worker with whose cores another one computes now.
    """

    num_tokens: float
    step_time: StepTimeModel
    num_late_tokens: float = 0.0
    may_take: bool = True

    def seconds(self, num_more: float = 0.0, *, length: float, passes_late: bool = False) -> float:
        """The time to compute them and so many more, all of prompts of this length. ``passes_late``: without those that
        are late.
        """
        model = self.step_time
        num_tokens = self.num_tokens - self.num_late_tokens if passes_late else self.num_tokens
        return (model.prompt_token_s + model.prompt_read_s * length / 2.0) * (max(num_tokens, 0.0) + num_more)

    @property
    def least_s(self) -> float:
        """No prompt that comes ends sooner than after so long."""
        return self.step_time.prompt_token_s * max(self.num_tokens - self.num_late_tokens, 0.0)

    def without(self, num_tokens: float, *, is_late: bool) -> PromptQueue:
        """It when a prompt of so many has left."""
        num_late = self.num_late_tokens - num_tokens if is_late else self.num_late_tokens
        return replace(self, num_tokens=max(self.num_tokens - num_tokens, 0.0), num_late_tokens=max(num_late, 0.0))

    def with_more(self, num_tokens: float) -> PromptQueue:
        """It when a prompt of so many has come. Nobody passes a late one where nothing waits: it begins at once."""
        return replace(self, num_tokens=self.num_tokens + num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingPrompt:
    """A prompt of this router that has no token yet, and was sent to its worker at ``since_s``.

    left_s: so long its first token may take, less than 0 where its promise is lost; None: nothing was promised.
    cached_tokens: of it, by worker; none elsewhere. avoided: where it is generated, and not to be computed.
    """

    request_id: str
    replica_id: str
    num_tokens: int
    since_s: float
    left_s: float | None = None
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    avoided: str | None = None

    @property
    def is_late(self) -> bool:
        """True when its promise is lost: others pass it."""
        return self.left_s is not None and self.left_s <= 0.0

    @property
    def is_in_time(self) -> bool:
        """True when its promise can be kept: it passes those that are late."""
        return self.left_s is not None and self.left_s > 0.0

    def has_time(self, seconds: float) -> bool:
        """True when its promise is kept though it waits for so long."""
        return self.left_s is not None and seconds < self.left_s

    def tokens_at(self, replica_id: str) -> int:
        """What a worker has to compute of it: the last token in any case."""
        return max(self.num_tokens - self.cached_tokens.get(replica_id, 0), 1)


def may_give(queues: Mapping[str, PromptQueue], longest: Mapping[str, int]) -> set[str]:
    """The workers that prompts could leave at all, of those where the ``longest`` that wait have so many tokens.

    Of others no prompt needs to be looked at: even with nothing cached here, and all of it there, its worker would end
    it hardly later than any other. Where all are equally far behind, as in a flood, that is every worker.
    """
    known = {name: queue for name, queue in queues.items() if queue.step_time.prompt_token_s > 0.0}
    takers = sorted((queue.least_s, name) for name, queue in known.items() if queue.may_take)[:2]
    able: set[str] = set()
    for name, length in longest.items():
        least_s = next((seconds for seconds, taker in takers if taker != name), None)
        if name in known and least_s is not None:
            is_behind = known[name].seconds(length=length) >= MARGIN * least_s + LEAST_GAIN_S
            if is_behind:
                able.add(name)
    return able


def plan_prompt_moves(
    queues: Mapping[str, PromptQueue], prompts: Sequence[WaitingPrompt], *, num_moves: int
) -> list[PlannedMove]:
    """The moves that should begin now, from the worker that is furthest behind to the one that would be soonest ready.

    Of a worker's prompts those go first that are late already, since all others have their turn before them, and among
    these the one that came last. Those that are in time where they are stay.
    """
    queues = {name: queue for name, queue in queues.items() if queue.step_time.prompt_token_s > 0.0}
    waiting: dict[str, list[WaitingPrompt]] = {}
    for prompt in sorted(prompts, key=lambda item: (item.is_late, item.since_s)):
        if prompt.replica_id in queues:
            waiting.setdefault(prompt.replica_id, []).append(prompt)
    moves: list[PlannedMove] = []
    while waiting and len(moves) < num_moves:
        source = max(waiting, key=lambda name: (queues[name].seconds(length=waiting[name][-1].num_tokens), name))
        prompt = waiting[source].pop()
        if not waiting[source]:
            del waiting[source]
        target = _target(queues, prompt)
        if target is None:
            continue
        queues[source] = queues[source].without(prompt.tokens_at(source), is_late=prompt.is_late)
        queues[target] = queues[target].with_more(prompt.tokens_at(target))
        move = PlannedMove(request_id=prompt.request_id, source=source, target=target, reason=MoveReason.QUEUE)
        moves.append(move)
    return moves


def _target(queues: Mapping[str, PromptQueue], prompt: WaitingPrompt) -> str | None:
    """The worker that would end a prompt soonest, with all that is ahead of it; None: hardly sooner than its own."""
    source, length = prompt.replica_id, prompt.num_tokens
    here_s = queues[source].seconds(length=length, passes_late=prompt.is_in_time)
    if prompt.has_time(here_s):
        return None
    ends_s = {
        name: queue.seconds(prompt.tokens_at(name), length=length, passes_late=prompt.is_in_time)
        for name, queue in queues.items()
        if queue.may_take and name not in (source, prompt.avoided)
    }
    target = min(ends_s, key=lambda name: (ends_s[name], name), default=None)
    if target is None or here_s < MARGIN * ends_s[target] + LEAST_GAIN_S:
        return None
    return target
