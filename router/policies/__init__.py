"""Routing policies: small pure functions that choose a replica by the replicas' state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.contract.role import LoadMeasure, Role
from router.policies.candidate import Ask, Candidate, CandidateT, Policy
from router.policies.least_loaded import PowerOfTwo, fewest_queued_tokens, lowest_kv_usage
from router.policies.prefix import least_usage_with_bonus, least_work
from router.policies.unaware import RandomChoice, RoundRobin

PREFIX = "prefix"
"""The policy that needs the contents of prefix caches."""

_FACTORIES: dict[str, Callable[[LoadMeasure], Policy]] = {
    "kv_usage": lambda _: lowest_kv_usage,
    PREFIX: lambda measure: least_work if measure is LoadMeasure.QUEUED_TOKENS else least_usage_with_bonus,
    "queued_tokens": lambda _: fewest_queued_tokens,
    "power_of_two": lambda _: PowerOfTwo(),
    "round_robin": lambda _: RoundRobin(),
    "random": lambda _: RandomChoice(),
}


def policy_names() -> Sequence[str]:
    """The names that ``make_policy`` knows."""
    return tuple(_FACTORIES)


def make_policy(name: str, role: Role) -> Policy:
    """A policy by its name, for the replicas of one role.

    Raises:
        ValueError: There is no such policy; the message lists the known ones.
    """
    if name not in _FACTORIES:
        raise ValueError(f"unknown policy {name!r}; known policies: {', '.join(_FACTORIES)}")
    return _FACTORIES[name](role.measure)


__all__ = ["PREFIX", "Ask", "Candidate", "CandidateT", "Policy", "make_policy", "policy_names"]
