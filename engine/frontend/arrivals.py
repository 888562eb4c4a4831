"""Requests that came while a step runs: the engine learns of them when that has ended, and routers before.

A step with a long prompt takes as long as tens of requests need to come. Who sent one knows that it is there; the other
routers would go by what the last report said, and all send theirs to the worker that had least to do then.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from engine.contract.messages import GenerateRequest, LoadReport, TokenDelta


class Waiting(NamedTuple):
    """Requests, and the tokens of their prompts."""

    num_requests: int = 0
    num_prompt_tokens: int = 0

    def plus(self, other: Waiting, times: int = 1) -> Waiting:
        """Both together."""
        return Waiting(
            self.num_requests + times * other.num_requests,
            self.num_prompt_tokens + times * other.num_prompt_tokens,
        )


NOTHING = Waiting()


class Arrivals:
    """Sums over the requests that no report counts yet. Changed on one event loop; read from any thread."""

    def __init__(self) -> None:
        self._coming: Mapping[str, Waiting] = {}
        """By client, those that the engine has not answered; replaced, never changed."""
        self._added: tuple[LoadReport | None, Waiting] = (None, NOTHING)
        """Those that it has, and what it reported last before: they count until it reports again."""

    def come(self, requests: Sequence[GenerateRequest]) -> None:
        """These wait for the end of a step."""
        self._add_coming(requests, 1)

    def answered(
        self, requests: Sequence[GenerateRequest], *, added: Sequence[GenerateRequest], before: LoadReport | None
    ) -> None:
        """Nothing more comes of requests that came; some were ``added``, which the engine reports behind ``before``."""
        self._add_coming(requests, -1)
        if added:
            last, waiting = self._added
            self._added = (before, (waiting if last is before else NOTHING).plus(_sum(added)))

    def told_to(self, client_id: str, load: LoadReport, *, told: LoadReport) -> LoadReport:
        """What a client is told of ``load``, the engine's, which ``told`` says with what stands beside it.

        Its own requests it counts itself until they are answered.
        """
        before, waiting = self._added
        if before is not load:
            waiting = NOTHING
        for other_id, coming in self._coming.items():
            if other_id != client_id:
                waiting = waiting.plus(coming)
        if waiting == NOTHING:
            return told
        return replace(
            told,
            num_waiting=told.num_waiting + waiting.num_requests,
            queued_prefill_tokens=told.queued_prefill_tokens + waiting.num_prompt_tokens,
        )

    def _add_coming(self, requests: Sequence[GenerateRequest], times: int) -> None:
        coming = dict(self._coming)
        for request in requests:
            coming[request.client_id] = coming.get(request.client_id, NOTHING).plus(_sum([request]), times)
        self._coming = {client_id: waiting for client_id, waiting in coming.items() if waiting.num_requests}


class NewsStream(Protocol):
    """One client's messages."""

    def put(self, deltas: Sequence[TokenDelta]) -> None:
        """Send a message with these; without any, since the load is news."""


def tell_news(streams: Mapping[str, NewsStream], *, but: Container[str]) -> None:
    """Tell the load to all clients but those that know, or hear of it anyway."""
    for client_id, stream in streams.items():
        if client_id not in but:
            stream.put(())


def changes_queues(before: LoadReport, after: LoadReport) -> bool:
    """True when requests came, began, ended or left between two reports."""
    return _num_requests(before) != _num_requests(after)


def _num_requests(load: LoadReport) -> tuple[int, int, int]:
    return load.num_waiting, load.num_running, load.num_loading


def _sum(requests: Sequence[GenerateRequest]) -> Waiting:
    """What may have to be computed of their prompts: what is cached here nobody knows yet."""
    return Waiting(len(requests), sum(len(item.prompt_token_ids) for item in requests if item.kv_transfer is None))
