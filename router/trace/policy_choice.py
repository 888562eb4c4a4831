"""What is told of a choice: that of a placement, or that of a policy, which predicts nothing."""

from __future__ import annotations

from router.placement.reason import Reason
from router.pool.placing import NamedPlan, Placed
from router.pool.pool import ReplicaPool
from router.roles import ROLES
from router.settings import RouterSettings
from router.trace.choice import MAX_ALTERNATIVES, Choice, Option


def policy_choice(
    pool: ReplicaPool,
    *,
    settings: RouterSettings,
    role: str,
    chosen: str,
    other: str | None = None,
    reason: str | None = None,
) -> Choice:
    """A worker of ``role`` was chosen by its policy, or for ``reason``; ``other`` has the other role, if known."""
    names = [chosen, *(item.replica_id for item in pool.candidates((chosen,))[:MAX_ALTERNATIVES])]
    is_prefill = role == "prefill"
    options = [
        Option(prefill=name, decode=other) if is_prefill else Option(prefill=other, decode=name) for name in names
    ]
    reason = reason or f"policy {settings.policy_of(ROLES[role])}"
    return Choice(chosen=options[0], reason=reason, alternatives=options[1:])


def placed_choice(pool: ReplicaPool, placed: Placed, *, settings: RouterSettings) -> Choice:
    """Where a request was placed, and what else was weighed."""
    stream, prompt = placed.stream.replica_id, None if placed.prompt is None else placed.prompt.replica_id
    if placed.weighed:
        chosen, *others = map(_option, placed.weighed)
        return Choice(chosen=chosen, reason=(placed.reason or Reason.COLOCATED).value, alternatives=others)
    if placed.reason is None:
        return policy_choice(pool, settings=settings, role="decode", chosen=stream, other=prompt)
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
