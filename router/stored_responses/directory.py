"""Finds a stored response at the router that keeps it; the response's id names that router."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from router.errors import ResponseNotFoundError, ResponseUnreachableError
from router.pool.workers import WorkerError
from router.stored_responses.store import Order, ResponseStore, StoredResponse

_ID = re.compile(r"resp_(.{1,128})_[0-9a-f]{32}")


class ResponsePeers(Protocol):
    """How this router reaches the responses that other routers keep."""

    def peer_ids(self) -> Sequence[str]:
        """Ids of the routers that can be asked now. Makes no network call."""

    async def take_order(
        self, router_id: str, order: Order, response_id: str, *, owner: str, timeout_s: float
    ) -> StoredResponse | None:
        """Ask one peer to read, delete or cancel a response that it keeps.

        Raises:
            WorkerUnavailableError: The peer is gone, or does not answer in time.
        """


class ResponseDirectory:
    """Reaches all stored responses of the cluster from one router."""

    def __init__(
        self, store: ResponseStore, peers: ResponsePeers, *, own_id: str, timeout_s: float, retry_after_s: float
    ) -> None:
        self.store = store
        self._peers = peers
        self._own_id = own_id
        self._timeout_s, self._retry_after_s = timeout_s, retry_after_s

    async def read(self, response_id: str, *, owner: str) -> StoredResponse:
        """The current state of a response; raises as ``take_order`` does."""
        return await self.take_order("read", response_id, owner=owner)

    async def take_order(self, order: Order, response_id: str, *, owner: str) -> StoredResponse:
        """Read, delete or cancel a response at the router that keeps it.

        Returns:
            The response as it was found, or as it is after cancellation.

        Raises:
            ResponseNotFoundError: No such response, it has another owner, or the router that kept it is gone.
            ResponseUnreachableError: The router that keeps it does not answer.
        """
        match = _ID.fullmatch(response_id)
        router_id = match[1] if match else self._own_id
        if router_id == self._own_id:
            found = self.store.take_order(order, response_id, owner=owner)
        elif router_id in self._peers.peer_ids():
            try:
                found = await self._peers.take_order(
                    router_id, order, response_id, owner=owner, timeout_s=self._timeout_s
                )
            except WorkerError as error:
                raise ResponseUnreachableError(
                    response_id=response_id, router_id=router_id, retry_after_s=self._retry_after_s
                ) from error
        else:
            found = None
        if found is None:
            raise ResponseNotFoundError(response_id=response_id)
        return found
