"""Finds a response in whichever router of the cluster keeps it: its id names that router."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from router.errors import ResponseNotFoundError, ResponseUnreachableError
from router.pool.workers import WorkerError
from router.stored_responses.store import Order, ResponseStore, StoredResponse

_ID = re.compile(r"resp_(.{1,128})_[0-9a-f]{32}")


class ResponsePeers(Protocol):
    """The other routers, as far as their responses go."""

    def peer_ids(self) -> Sequence[str]:
        """Those that can be asked now, without a network call."""

    async def take_order(
        self, router_id: str, order: Order, response_id: str, *, owner: str, timeout_s: float
    ) -> StoredResponse | None:
        """Ask one to read, delete or cancel a response that it keeps.

        Raises:
            WorkerUnavailableError: It is gone, or does not answer in time.
        """


class ResponseDirectory:
    """All responses of the cluster, as one router reaches them."""

    def __init__(
        self, store: ResponseStore, peers: ResponsePeers, *, own_id: str, timeout_s: float, retry_after_s: float
    ) -> None:
        self.store = store
        self._peers = peers
        self._own_id = own_id
        self._timeout_s, self._retry_after_s = timeout_s, retry_after_s

    async def read(self, response_id: str, *, owner: str) -> StoredResponse:
        """A response as it is now; raises as ``take_order`` does."""
        return await self.take_order("read", response_id, owner=owner)

    async def take_order(self, order: Order, response_id: str, *, owner: str) -> StoredResponse:
        """Read, delete or cancel a response, where it is.

        Returns:
            The response as it was found, or after it was cancelled.

        Raises:
            ResponseNotFoundError: There is none, or not of this owner, or the router that kept it is gone.
            ResponseUnreachableError: Its router does not answer.
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
