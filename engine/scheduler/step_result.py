"""The result of a step for the front ends: an array of tokens until messages are asked for. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from engine.contract.messages import TokenDelta, Told
from engine.contract.step import EMPTY_INTS, IntArray
from engine.scheduler.requests.request import Request


def tokens_of(index: int, token_ids: IntArray, starts: IntArray | None) -> tuple[int, ...]:
    """One request's new tokens; see ``StepResult`` for the arguments."""
    if starts is None:
        return (int(token_ids[index]),)
    return tuple(token_ids[starts[index] : starts[index + 1]].tolist())


class StepResult(NamedTuple):
    """New tokens of one step, and the ends since the previous one. Immutable: any thread may ask it for messages.

    ``token_ids`` are the new tokens of ``requests``, one request after the other. ``starts``, [num_requests + 1], says
    where each request's tokens begin; None where each has one. ``special`` holds, by index, the deltas that say more
    than tokens: a request's first and last ones, and those with log-probabilities. ``finished`` are the ends that
    happened between steps. ``told`` is what else is reported of requests, with the client of each.
    """

    requests: Sequence[Request] = ()
    token_ids: IntArray = EMPTY_INTS
    starts: IntArray | None = None
    special: Mapping[int, TokenDelta] = MappingProxyType({})
    finished: Sequence[tuple[str, TokenDelta]] = ()
    told: Sequence[tuple[str, Told]] = ()

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to tell any client."""
        return not (self.requests or self.finished)

    def deltas_by_client(self) -> dict[str, list[TokenDelta]]:
        """The deltas for each front end, in batch order."""
        by_client: dict[str, list[TokenDelta]] = {}
        for client_id, delta in self.finished:
            by_client.setdefault(client_id, []).append(delta)
        special = self.special
        for index, (request, token_ids) in enumerate(zip(self.requests, self._tokens_of_each(), strict=True)):
            delta = special.get(index) or TokenDelta(request.request_id, token_ids)
            deltas = by_client.get(request.client_id)
            if deltas is None:
                deltas = by_client[request.client_id] = []
            deltas.append(delta)
        return by_client

    def told_by_client(self) -> dict[str, list[Told]]:
        """What is told to each front end besides deltas; empty in most steps."""
        by_client: dict[str, list[Told]] = {}
        for client_id, told in self.told:
            by_client.setdefault(client_id, []).append(told)
        return by_client

    def _tokens_of_each(self) -> Iterable[tuple[int, ...]]:
        token_ids = self.token_ids.tolist()
        if self.starts is None:
            return zip(token_ids, strict=True)
        return [tuple(token_ids[start:end]) for start, end in pairwise(self.starts.tolist())]

    def deltas(self) -> list[TokenDelta]:
        """The deltas for all front ends."""
        return [delta for deltas in self.deltas_by_client().values() for delta in deltas]


NOTHING_NEW = StepResult()
