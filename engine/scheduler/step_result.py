"""What a step gave, for the front ends: an array of tokens until somebody asks for messages. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from engine.contract.messages import TokenDelta
from engine.contract.step import EMPTY_INTS, IntArray
from engine.scheduler.requests.request import Request


class StepResult(NamedTuple):
    """New tokens of one step and the ends since the last one. It does not change: any thread may ask for messages.

    ``token_ids[i]`` is the new token of ``requests[i]``; ``special`` holds the deltas, by index, that say more than a
    token: a request's first and its last. ``finished`` are the ends that happened between steps.
    """

    requests: Sequence[Request] = ()
    token_ids: IntArray = EMPTY_INTS
    special: Mapping[int, TokenDelta] = MappingProxyType({})
    finished: Sequence[tuple[str, TokenDelta]] = ()

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to tell anybody."""
        return not (self.requests or self.finished)

    def deltas_by_client(self) -> dict[str, list[TokenDelta]]:
        """The messages for each front end, in batch order."""
        by_client: dict[str, list[TokenDelta]] = {}
        for client_id, delta in self.finished:
            by_client.setdefault(client_id, []).append(delta)
        special = self.special
        for index, (request, token_id) in enumerate(zip(self.requests, self.token_ids.tolist(), strict=True)):
            delta = special.get(index) or TokenDelta(request.request_id, (token_id,))
            deltas = by_client.get(request.client_id)
            if deltas is None:
                deltas = by_client[request.client_id] = []
            deltas.append(delta)
        return by_client

    def deltas(self) -> list[TokenDelta]:
        """The messages for all front ends."""
        return [delta for deltas in self.deltas_by_client().values() for delta in deltas]


NOTHING_NEW = StepResult()
