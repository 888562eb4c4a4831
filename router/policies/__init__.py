"""Which replica takes a request: small pure functions over what is known of the replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.policies.candidate import Candidate, CandidateT, Policy
from router.policies.kv_usage import lowest_kv_usage
from router.policies.power_of_two import PowerOfTwo
from router.policies.queued_tokens import fewest_queued_tokens
from router.policies.round_robin import RoundRobin

_FACTORIES: dict[str, Callable[[], Policy]] = {
    "kv_usage": lambda: lowest_kv_usage,
    "queued_tokens": lambda: fewest_queued_tokens,
    "round_robin": RoundRobin,
    "power_of_two": PowerOfTwo,
}


def policy_names() -> Sequence[str]:
    """The names that ``make_policy`` knows."""
    return tuple(_FACTORIES)


def make_policy(name: str) -> Policy:
    """A policy by its name.

    Raises:
        ValueError: There is no such policy; the message lists the known ones.
    """
    if name not in _FACTORIES:
        raise ValueError(f"unknown policy {name!r}; known policies: {', '.join(_FACTORIES)}")
    return _FACTORIES[name]()


__all__ = ["Candidate", "CandidateT", "Policy", "make_policy", "policy_names"]
