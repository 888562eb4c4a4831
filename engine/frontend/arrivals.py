"""Requests that arrive while a step runs. The engine reports them when the step ends; routers hear of them before.

During a step with a long prompt, tens of requests may arrive. The router that sent a request knows of it. The other
routers would rely on the last report, and all send their requests to the worker that was least busy then.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from engine.contract.messages import GenerateRequest, LoadReport, TokenDelta


class Waiting(NamedTuple):
    """A number of requests, and the sum of their prompt tokens."""

    num_requests: int = 0
    num_prompt_tokens: int = 0

    def plus(self, other: Waiting, times: int = 1) -> Waiting:
        """The sum of both."""
        return Waiting(
            self.num_requests + times * other.num_requests,
            self.num_prompt_tokens + times * other.num_prompt_tokens,
        )


NOTHING = Waiting()


class Arrivals:
    """Sums over the requests that no report counts yet. Changed only on the event loop; read from any thread."""

    def __init__(self) -> None:
        self._coming: Mapping[str, Waiting] = {}
        """By client, the requests that the engine has not answered; the mapping is replaced, never changed."""
        self._added: tuple[LoadReport | None, Waiting] = (None, NOTHING)
        """Added requests, and the engine's last report before them: they count until the engine reports again."""

    def come(self, requests: Sequence[GenerateRequest]) -> None:
        """Count requests that the engine has not answered."""
        self._add_coming(requests, 1)

    def answered(
        self, requests: Sequence[GenerateRequest], *, added: Sequence[GenerateRequest], before: LoadReport | None
    ) -> None:
        """Stop counting requests as arriving; the ``added`` ones count until the engine's report after ``before``."""
        self._add_coming(requests, -1)
        if added:
            last, waiting = self._added
            self._added = (before, (waiting if last is before else NOTHING).plus(_sum(added)))

    def told_to(self, client_id: str, load: LoadReport, *, told: LoadReport) -> LoadReport:
        """The report for one client: ``told``, plus the arrivals that ``load`` does not count yet.

        ``load`` is the engine's own report, and ``told`` extends it with the front end's facts. A client's own requests
        that are not answered yet are left out: it counts them itself.
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
    """The stream of one client's messages."""

    def put(self, deltas: Sequence[TokenDelta]) -> None:
        """Send a message with these deltas; an empty one is sent too, because the load has changed."""


def tell_news(streams: Mapping[str, NewsStream], *, but: Container[str]) -> None:
    """Report the load to all clients except those in ``but``, which know it or are told anyway."""
    for client_id, stream in streams.items():
        if client_id not in but:
            stream.put(())


def changes_queues(before: LoadReport, after: LoadReport) -> bool:
    """True when requests came, began, ended or left between the two reports."""
    return _num_requests(before) != _num_requests(after)


def _num_requests(load: LoadReport) -> tuple[int, int, int]:
    return load.num_waiting, load.num_running, load.num_loading


def _sum(requests: Sequence[GenerateRequest]) -> Waiting:
    """The most that may have to be computed of their prompts: how much is cached here is not known yet."""
    return Waiting(len(requests), sum(len(item.prompt_token_ids) for item in requests if item.kv_transfer is None))
