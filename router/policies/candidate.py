"""The Protocol of policies, and the state that they may read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """A replica that could take the request. Plain attributes, because a choice reads hundreds of them."""

    @property
    def replica_id(self) -> str:
        """Its name."""

    @property
    def num_blocks(self) -> int:
        """Size of its KV cache."""

    @property
    def promised_usage(self) -> float:
        """Share of its KV blocks in use, or reserved for requests on their way; can exceed 1."""

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that wait to be computed there, including those on their way."""

    @property
    def num_queued(self) -> int:
        """Requests that wait there or are on their way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """The request's properties: its prompt's length, and how much of it each replica has in its prefix cache."""

    num_tokens: int = 0
    cached_tokens: Mapping[str, int] = field(default_factory=dict)


CandidateT = TypeVar("CandidateT", bound=Candidate)


class Policy(Protocol):
    """Chooses one candidate; there is at least one. It keeps no state about requests."""

    def __call__(self, candidates: Sequence[CandidateT], ask: Ask, /) -> CandidateT:
        """The replica that takes the request."""
