"""Chooses prompts that wait at one worker and should be computed by another: a pure function of the queues.

A prompt is placed when it arrives. Later arrivals, also from other routers, make that prediction wrong, and prompts
that have missed their promise are overtaken by others. So one worker can be idle while prompts wait at another. Source
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
"""A prompt is moved if its worker's queue takes at least ``MARGIN`` times as long as the other worker's queue with the
prompt in it, plus ``LEAST_GAIN_S``: the margins allow for errors of prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptQueue:
    """The prompt tokens that a worker still has to compute. ``num_late_tokens`` of them belong to waiting prompts that
    have missed their promise; prompts that are in time overtake these.

    ``may_take``: prompts may move here. False for a worker whose cores another one is using, or that keeps to streams.
    """

    num_tokens: float
    step_time: StepTimeModel
    num_late_tokens: float = 0.0
    may_take: bool = True

    def seconds(self, num_more: float = 0.0, *, length: float, passes_late: bool = False) -> float:
        """The time to compute the queue and ``num_more`` tokens, as prompts of this length. ``passes_late``: without
        the late tokens.
        """
        model = self.step_time
        num_tokens = self.num_tokens - self.num_late_tokens if passes_late else self.num_tokens
        return (model.prompt_token_s + model.prompt_read_s * length / 2.0) * (max(num_tokens, 0.0) + num_more)

    @property
    def least_s(self) -> float:
        """A lower bound on the time until a prompt that arrives now is computed."""
        return self.step_time.prompt_token_s * max(self.num_tokens - self.num_late_tokens, 0.0)

    def without(self, num_tokens: float, *, is_late: bool) -> PromptQueue:
        """The queue after a prompt of ``num_tokens`` has left."""
        num_late = self.num_late_tokens - num_tokens if is_late else self.num_late_tokens
        return replace(self, num_tokens=max(self.num_tokens - num_tokens, 0.0), num_late_tokens=max(num_late, 0.0))

    def with_more(self, num_tokens: float) -> PromptQueue:
        """The queue after a prompt of ``num_tokens`` has come. It does not count as late: it is moved to begin soon."""
        return replace(self, num_tokens=self.num_tokens + num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingPrompt:
    """A prompt of this router that has no token yet, and was sent to its worker at ``since_s``.

    left_s: time left until its first token is due, negative once the promise is missed; None: no promise.
    cached_tokens: its cached tokens by worker; other workers have none. avoided: the worker that will generate, which
    should not compute the prompt.
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
        """True if its promise is missed; others overtake it."""
        return self.left_s is not None and self.left_s <= 0.0

    @property
    def is_in_time(self) -> bool:
        """True if its promise can still be kept; it overtakes late ones."""
        return self.left_s is not None and self.left_s > 0.0

    def has_time(self, seconds: float) -> bool:
        """True if its promise is kept even after waiting for ``seconds``."""
        return self.left_s is not None and seconds < self.left_s

    def tokens_at(self, replica_id: str) -> int:
        """How many of its tokens a worker has to compute: at least the last one."""
        return max(self.num_tokens - self.cached_tokens.get(replica_id, 0), 1)


def may_give(queues: Mapping[str, PromptQueue], longest: Mapping[str, int]) -> set[str]:
    """The workers that prompts might leave. ``longest`` has the length of the longest waiting prompt of each worker.

    The prompts of other workers need no closer look: even if the prompt were cached nowhere here and completely
    elsewhere, moving it would hardly gain time. In a flood, with all workers equally far behind, none is returned.
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
    """The moves that should begin now, from the worker that is furthest behind to the one that would be done soonest.

    A worker's late prompts are moved first, because all others are computed before them; among these the last to
    arrive goes first. Prompts that are in time at their worker stay.
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
    """The worker that would complete a prompt soonest, behind its queue; None if that is hardly sooner than here."""
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
