"""Where a request was placed, what was predicted for that plan, and the alternatives."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.contract.role import Work
from router.placement.reason import Reason
from router.pool.placing import NamedPlan, Placed
from router.pool.pool import ReplicaPool

MAX_ALTERNATIVES = 4
"""How many of the other plans are kept, the best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The workers that could compute a prompt and generate after it. ``predicted_*`` None: there is no prediction.

    ``prefill`` None: it is decided later, or never. ``predicted_cost`` is in the planner's seconds.
    ``num_head_tokens``: how many tokens of a split prompt ``prefill`` computes; 0: the prompt is not split.
    """

    prefill: str | None
    decode: str | None
    predicted_ttft_s: float | None = None
    predicted_cost: float | None = None
    num_head_tokens: int = 0

    def told(self) -> dict[str, Any]:
        """As JSON."""
        return {
            **self.places(),
            "predicted_ttft_ms": _ms(self.predicted_ttft_s),
            "predicted_cost": None if self.predicted_cost is None else round(self.predicted_cost, 6),
        }

    def places(self) -> dict[str, Any]:
        """The workers alone, without predictions; ``head_tokens`` is included if the prompt is split."""
        places: dict[str, Any] = {"prefill": self.prefill, "decode": self.decode}
        return {**places, "head_tokens": self.num_head_tokens} if self.num_head_tokens else places


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One placement decision. ``reason`` is one of ``router.placement.reason``, or ``policy <name>``; ``at_s`` is in
    seconds of ``time.perf_counter``.
    """

    chosen: Option
    reason: str
    alternatives: Sequence[Option] = ()
    at_s: float = field(default_factory=time.perf_counter)

    def told(self, started_s: float) -> dict[str, Any]:
        """As JSON, times in milliseconds after the start."""
        return {
            "at_ms": round((self.at_s - started_s) * 1e3, 3),
            "chosen": self.chosen.places(),
            "reason": self.reason,
            "predicted_ttft_ms": _ms(self.chosen.predicted_ttft_s),
            "alternatives": [option.told() for option in self.alternatives],
        }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def policy_choice(
    pool: ReplicaPool,
    *,
    work: Work,
    chosen: str,
    other: str | None = None,
    reason: str | None = None,
) -> Choice:
    """A worker that the policy for this kind of work chose, or that ``reason`` did; ``other`` does the other kind, if
    that is known."""
    names = [chosen, *(item.replica_id for item in pool.candidates((chosen,), work)[:MAX_ALTERNATIVES])]
    is_prefill = work is Work.PROMPT
    options = [
        Option(prefill=name, decode=other) if is_prefill else Option(prefill=other, decode=name) for name in names
    ]
    reason = reason or f"policy {pool.policies.names[work]}"
    return Choice(chosen=options[0], reason=reason, alternatives=options[1:])


def placed_choice(pool: ReplicaPool, placed: Placed) -> Choice:
    """Where the planner placed a request, and the plans that it compared."""
    stream, prompt = placed.stream.replica_id, None if placed.prompt is None else placed.prompt.replica_id
    if placed.weighed:
        chosen, *others = map(_option, placed.weighed)
        return Choice(chosen=chosen, reason=(placed.reason or Reason.COLOCATED).value, alternatives=others)
    if placed.reason is None:
        return policy_choice(pool, work=Work.STREAM, chosen=stream, other=prompt)
    option = Option(prefill=prompt, decode=stream, num_head_tokens=placed.num_head_tokens)
    return Choice(chosen=option, reason=placed.reason.value)


def _option(plan: NamedPlan) -> Option:
    return Option(
        prefill=plan.prompt,
        decode=plan.stream,
        predicted_ttft_s=plan.ttft_s,
        predicted_cost=plan.cost,
        num_head_tokens=plan.num_head_tokens,
    )
