"""What a step gave, for the front ends: arrays until somebody asks for messages. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.core.request import Request
from engine.messages import TokenDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """New tokens of one step and the ends since the last one.

    ``token_ids[i]`` is the new token of ``requests[i]``; ``special`` holds the deltas, by index, that say more than a
    token: a request's first and its last. ``news`` are the ends that happened between steps.
    """

    requests: Sequence[Request] = ()
    token_ids: Sequence[int] = ()
    special: Mapping[int, TokenDelta] = field(default_factory=dict)
    news: Sequence[tuple[str, TokenDelta]] = ()

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to tell anybody."""
        return not (self.requests or self.news)

    def deltas_by_client(self) -> dict[str, list[TokenDelta]]:
        """The messages for each front end, in batch order."""
        by_client: dict[str, list[TokenDelta]] = {}
        for client_id, delta in self.news:
            by_client.setdefault(client_id, []).append(delta)
        special = self.special
        for index, (request, token_id) in enumerate(zip(self.requests, self.token_ids, strict=True)):
            delta = special.get(index) or TokenDelta(request.request_id, (token_id,))
            deltas = by_client.get(request.client_id)
            if deltas is None:
                deltas = by_client[request.client_id] = []
            deltas.append(delta)
        return by_client


NOTHING_NEW = StepResult()
