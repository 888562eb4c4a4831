"""What a policy may look at, and what it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """A replica that could take the request. Policies read it hundreds of times a choice: plain attributes."""

    @property
    def replica_id(self) -> str:
        """Its name."""

    @property
    def num_blocks(self) -> int:
        """Size of its KV cache."""

    @property
    def promised_usage(self) -> float:
        """Share of its KV blocks that is in use or promised to requests on their way; can exceed 1."""

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that wait to be computed there, those on their way included."""

    @property
    def num_queued(self) -> int:
        """Requests that wait there or are on their way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What the request asks for: its prompt's length, and how much of it each replica has in its prefix cache."""

    num_tokens: int = 0
    cached_tokens: Mapping[str, int] = field(default_factory=dict)


CandidateT = TypeVar("CandidateT", bound=Candidate)


class Policy(Protocol):
    """Chooses one of at least one candidates. Keeps nothing of a request."""

    def __call__(self, candidates: Sequence[CandidateT], ask: Ask, /) -> CandidateT:
        """The replica that takes the request."""
