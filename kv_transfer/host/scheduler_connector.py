"""The scheduler's half of the host tier: what is kept, what can be had back, and which slots are being read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kv_transfer.cache_groups import ABSENT_BLOCK, GroupBlocks, block_place
from kv_transfer.connector import (
    NO_ORDERS,
    ConnectorOrders,
    LeaseEnded,
    LoadOrder,
    RemoteMatch,
    StoreOrder,
)
from kv_transfer.errors import KVTransferError
from kv_transfer.host.store import HostStore
from kv_transfer.layout import KVLayout
from kv_transfer.params import PROTOCOL_VERSION, KVStreamParams, KVTransferParams, PeerIdentity
from kv_transfer.peer.lease import LeaseTable

_NOTHING: Final = RemoteMatch(num_tokens=0)


class HostSchedulerConnector:
    """Implements ``SchedulerConnector``. Owned by the engine's thread; free of torch.

    What ``match`` found is pinned until the next ``match``, so that the evictions of the same admission cannot take
    it; what is being loaded is pinned under a lease of our own, which ends as any lease does.
    """

    def __init__(self, *, identity: PeerIdentity, layout: KVLayout, leases: LeaseTable, num_slots: int) -> None:
        self.store = HostStore(num_slots)
        self.num_hit_blocks = 0
        self.num_stored_blocks = 0
        self.num_refused_blocks = 0
        self._identity = identity
        self._layout = layout
        self._leases = leases
        self._groups = layout.cache_groups
        self._matched: dict[int, int] = {}
        self._leased: dict[str, tuple[int, ...]] = {}
        self._stores: list[StoreOrder] = []
        self._loads: list[LoadOrder] = []
        self._cancelled: list[str] = []

    @property
    def num_loading(self) -> int:
        """Loads whose slots are still pinned."""
        return len(self._leased)

    @property
    def can_stream(self) -> bool:
        """Nothing here is computed while it is read."""
        return False

    def expect(self, params: KVTransferParams) -> None:
        """Hand-overs are not the tier's."""

    def pass_on(self, params: KVTransferParams) -> None:
        """Hand-overs are not the tier's."""

    def match(
        self,
        *,
        request_id: str,  # noqa: ARG002  (content is found by its address)
        params: KVTransferParams | None,  # noqa: ARG002
        num_prompt_tokens: int,  # noqa: ARG002
        num_local_tokens: int,
        block_hashes: Sequence[Sequence[bytes]] = (),
    ) -> RemoteMatch | None:
        """Offer the run of kept blocks behind the local prefix, of windows what is seen from its end; never None."""
        self._let_go_of_match()
        first_block, rest = divmod(num_local_tokens, self._layout.block_size)
        if rest or not block_hashes:
            return _NOTHING
        end = self._groups.longest_prefix(
            len(block_hashes[0]), first_block, lambda group, index: block_hashes[group][index] in self.store
        )
        if end <= first_block:
            return _NOTHING
        self._matched = self._find(block_hashes, first_block, end)
        self.store.pin(tuple(self._matched.values()))
        return RemoteMatch(num_tokens=(end - first_block) * self._layout.block_size)

    def _find(self, block_hashes: Sequence[Sequence[bytes]], first_block: int, end: int) -> dict[int, int]:
        """The slots of what is needed of these blocks, by place (``block_place``), in the order of the prompt."""
        firsts = [
            max(self._groups.first_block(group, end * self._layout.block_size), first_block)
            for group in range(len(block_hashes))
        ]
        return {
            block_place(index, group, len(firsts)): self.store.slot_of(block_hashes[group][index])
            for index in range(first_block, end)
            for group, first in enumerate(firsts)
            if index >= first
        }

    def begin_load(
        self,
        *,
        request_id: str,
        params: KVTransferParams | None,  # noqa: ARG002
        first_block: int,
        block_ids: GroupBlocks,
        stream_id: str | None = None,
    ) -> None:
        """Queue the load of what ``match`` found."""
        assert stream_id is None, "the tier streams nothing"
        if request_id in self._cancelled:
            self._cancelled.remove(request_id)  # it was meant for an earlier load, which has ended
        wanted = {
            block_place(first_block + index, group, len(block_ids)): block_id
            for index, column in enumerate(zip(*block_ids, strict=True))
            for group, block_id in enumerate(column)
            if block_id != ABSENT_BLOCK
        }
        assert wanted.keys() <= self._matched.keys(), "the scheduler asked for more blocks than were offered"
        slots = tuple(self._matched[place] for place in wanted)
        rest = tuple(slot for place, slot in self._matched.items() if place not in wanted)
        self._matched = {}
        self.store.unpin(rest)
        lease = self._leases.grant(request_id=request_id, block_ids=slots)
        self._leased[lease.lease_id] = slots
        self.num_hit_blocks += len(slots)
        ours = KVTransferParams(
            protocol_version=PROTOCOL_VERSION,
            source=self._identity,
            lease_id=lease.lease_id,
            layout_hash=self._layout.layout_hash,
            block_ids=(slots,),
            num_tokens=len(slots) * self._layout.block_size,
        )
        self._loads.append(
            LoadOrder(request_id=request_id, params=ours, source_block_ids=slots, block_ids=tuple(wanted.values()))
        )

    def begin_stream(
        self,
        *,
        stream_id: str,  # noqa: ARG002
        request_id: str,  # noqa: ARG002
        params: KVStreamParams,  # noqa: ARG002
        first_block: int,  # noqa: ARG002
        block_ids: GroupBlocks,  # noqa: ARG002
    ) -> bool:
        """False: see ``can_stream``."""
        return False

    def cancel_stream(self, stream_id: str) -> bool:  # noqa: ARG002
        """There is none."""
        return True

    def announce(self, *, request_id: str, first_block: int, block_ids: GroupBlocks) -> None:
        """Nobody reads from the tier."""

    def withdraw(self, request_id: str) -> None:
        """Nobody reads from the tier."""

    def cancel_load(self, request_id: str) -> None:
        """The request ended while loading; the worker's half ignores ids that it does not load."""
        self._cancelled.append(request_id)

    def release(self, params: KVTransferParams) -> None:
        """Hand-overs are not the tier's."""

    def keep_evicted(self, block_ids: Sequence[int], block_hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Queue copies of what is not kept already; returns what cannot be found here any more."""
        lost: dict[bytes, None] = {}
        stored: list[int] = []
        slots: list[int] = []
        for block_id, block_hash in zip(block_ids, block_hashes, strict=True):
            placed = self.store.place(block_hash)
            if placed is None:
                self.num_refused_blocks += 1
                lost[block_hash] = None
                continue
            lost.pop(block_hash, None)
            if placed.evicted is not None:
                lost[placed.evicted] = None
            if placed.is_new:
                stored.append(block_id)
                slots.append(placed.slot)
        if stored:
            self.num_stored_blocks += len(stored)
            self._stores.append(StoreOrder(block_ids=tuple(stored), slots=tuple(slots)))
        return tuple(lost)

    def forget_evicted(self) -> int:
        """Forget all content; what is being loaded stays pinned until its load ended."""
        self._let_go_of_match()
        num_kept = len(self.store)
        self.store.clear()
        return num_kept

    def grant_lease(self, *, request_id: str, block_ids: GroupBlocks, num_tokens: int) -> KVTransferParams:  # noqa: ARG002
        """Refused: the tier is no source for peers."""
        raise KVTransferError(f"the host tier lends nothing to peers: request_id={request_id} {num_tokens} tokens")

    def abort_lease(self, request_id: str) -> None:
        """Peers hold no leases here."""

    def take_orders(self) -> ConnectorOrders:
        """Hand over what was queued since the last call."""
        orders = ConnectorOrders(
            stores=tuple(self._stores), loads=tuple(self._loads), cancelled_loads=tuple(self._cancelled)
        )
        if orders.is_empty:
            return NO_ORDERS
        self._stores.clear()
        self._loads.clear()
        self._cancelled.clear()
        return orders

    def leases_ended(self, leases: Iterable[LeaseEnded]) -> None:
        """Loads were confirmed, or can be no more: their slots may be reused."""
        for lease in leases:
            self.store.unpin(self._leased.pop(lease.lease_id, ()))

    def check_integrity(self) -> None:
        """Compare the store's pins with the loads and the match that hold them.

        Raises:
            AssertionError: They disagree.
        """
        expected = [0] * self.store.num_slots
        for slots in (tuple(self._matched.values()), *self._leased.values()):
            for slot in slots:
                expected[slot] += 1
        self.store.check_integrity(expected)

    def _let_go_of_match(self) -> None:
        self.store.unpin(tuple(self._matched.values()))
        self._matched = {}
