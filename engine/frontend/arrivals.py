"""Requests that came while a step runs: the engine learns of them when that has ended, and routers before.

A step with a long prompt takes as long as tens of requests need to come. Who sent one knows that it is there; the other
routers would go by what the last report said, and all send theirs to the worker that had least to do then.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from engine.contract.messages import GenerateRequest, LoadReport, TokenDelta


class Arrival(NamedTuple):
    """One request. The engine knows of it once its load is another one than ``before``; None: it was not added yet."""

    request_id: str
    client_id: str
    num_prompt_tokens: int
    before: LoadReport | None = None

    def is_known_in(self, load: LoadReport) -> bool:
        """True when a report of the engine counts it."""
        return self.before is not None and self.before is not load


class SelfReport:
    """An engine's load with what its front end knows besides, made once for as long as neither changes."""

    def __init__(self) -> None:
        self._last: tuple[LoadReport | None, tuple[object, ...], LoadReport] = (None, (), LoadReport())

    def of(
        self,
        load: LoadReport,
        *,
        num_peers: int,
        leaning: str,
        is_draining: bool,
        is_stalled: bool = False,
        has_hung_read: bool = False,
    ) -> LoadReport:
        """The load with these."""
        stands = (num_peers, leaning, is_draining, is_stalled, has_hung_read)
        last_load, last_stands, told = self._last
        if last_load is not load or last_stands != stands:
            told = replace(
                load,
                num_peers=num_peers,
                leaning=leaning,
                is_draining=is_draining,
                is_stalled=is_stalled,
                has_hung_read=has_hung_read,
            )
            self._last = (load, stands, told)
        return told


class Arrivals:
    """The requests that no report counts yet. Changed on one event loop; read from any thread."""

    def __init__(self) -> None:
        self._arrivals: tuple[Arrival, ...] = ()

    def come(self, requests: Sequence[GenerateRequest], load: LoadReport) -> None:
        """These wait for the end of a step; ``load`` is what the engine reported last."""
        came = (Arrival(item.request_id, item.client_id, _num_prompt_tokens(item)) for item in requests)
        self._arrivals = (*(item for item in self._arrivals if not item.is_known_in(load)), *came)

    def added(self, requests: Sequence[GenerateRequest], before: LoadReport) -> None:
        """The engine has these, and reports them next, behind ``before``."""
        ids = {(item.client_id, item.request_id) for item in requests}
        self._arrivals = tuple(
            item._replace(before=before) if (item.client_id, item.request_id) in ids else item
            for item in self._arrivals
        )

    def gone(self, requests: Sequence[GenerateRequest]) -> None:
        """These are not here, refused or broken off."""
        ids = {(item.client_id, item.request_id) for item in requests}
        self._arrivals = tuple(item for item in self._arrivals if (item.client_id, item.request_id) not in ids)

    def told_to(self, client_id: str, load: LoadReport, *, told: LoadReport) -> LoadReport:
        """What a client is told of ``load``, the engine's, which ``told`` says with what stands beside it.

        With the requests of others: the client counts its own.
        """
        others = [
            item
            for item in self._arrivals
            if not item.is_known_in(load) and (item.client_id != client_id or item.before is not None)
        ]
        if not others:
            return told
        return replace(
            told,
            num_waiting=told.num_waiting + len(others),
            queued_prefill_tokens=told.queued_prefill_tokens + sum(item.num_prompt_tokens for item in others),
        )


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


def _num_prompt_tokens(request: GenerateRequest) -> int:
    """What may have to be computed of its prompt: what is cached here nobody knows yet."""
    return 0 if request.kv_transfer is not None else len(request.prompt_token_ids)
