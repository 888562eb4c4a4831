"""What a policy may look at, and what it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """A replica that could take the request."""

    @property
    def replica_id(self) -> str:
        """Its name."""

    @property
    def promised_usage(self) -> float:
        """Share of its KV blocks that is in use or promised to requests on their way; can exceed 1."""

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that wait to be computed there, those on their way included."""

    @property
    def num_queued(self) -> int:
        """Requests that wait there or are on their way."""


CandidateT = TypeVar("CandidateT", bound=Candidate)


class Policy(Protocol):
    """Chooses one of at least one candidates."""

    def __call__(self, candidates: Sequence[CandidateT], /) -> CandidateT:
        """The replica that takes the request."""
