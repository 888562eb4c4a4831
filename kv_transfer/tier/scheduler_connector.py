"""The scheduler's half of every tier: what it keeps, what can be loaded back, and which slots are being read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kv_transfer.cache_groups import ABSENT_BLOCK, GroupBlocks, block_place
from kv_transfer.connector import NO_ORDERS, ConnectorOrders, LeaseEnded, LoadOrder, StoreOrder
from kv_transfer.layout import KVLayout
from kv_transfer.params import PROTOCOL_VERSION, KVTransferParams, PeerIdentity
from kv_transfer.peer.lease import LeaseTable
from kv_transfer.protocols import NO_ADDRESS, RemoteMatch
from kv_transfer.tier.slots import Placed, SlotTable
from kv_transfer.tier.storage import LostSlot, TierStorage

_NOTHING: Final = RemoteMatch(num_tokens=0)


class TierSchedulerConnector:
    """Implements ``KVSource`` and ``EvictionTier`` over the slots of a storage. Free of torch; waits for no device.

    Slots that ``match`` found stay pinned until the next ``match``, so that evictions of the same admission cannot
    reuse them. Slots that are being loaded are pinned by a lease that this engine grants to itself.
    """

    def __init__(self, *, identity: PeerIdentity, layout: KVLayout, leases: LeaseTable, storage: TierStorage) -> None:
        self.slots = SlotTable(storage.num_slots)
        for number, block_hash in enumerate(storage.kept):
            placed = self.slots.place(block_hash)
            assert placed == Placed(slot=number, is_new=True), "the storage keeps something twice"
        self._storage = storage
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
        self._lost: dict[bytes, None] = {}

    @property
    def num_loading(self) -> int:
        """Loads whose slots are still pinned."""
        return len(self._leased)

    def match(
        self,
        *,
        request_id: str,  # noqa: ARG002  (content is found by its address)
        params: KVTransferParams | None,  # noqa: ARG002
        num_prompt_tokens: int,  # noqa: ARG002
        num_local_tokens: int,
        block_hashes: Sequence[Sequence[bytes]] = (),
    ) -> RemoteMatch | None:
        """Offer the longest run of kept blocks after the local prefix; never None.

        For groups with a window only the blocks that the run's end sees must be kept.
        """
        self._let_go_of_match()
        first_block, rest = divmod(num_local_tokens, self._layout.block_size)
        if rest or not block_hashes:
            return _NOTHING
        end = self._groups.longest_prefix(
            len(block_hashes[0]),
            first_block,
            lambda group, index: (address := block_hashes[group][index]) == NO_ADDRESS or address in self.slots,
        )
        if end <= first_block:
            return _NOTHING
        self._matched = self._find(block_hashes, first_block, end)
        self.slots.pin(tuple(self._matched.values()))
        return RemoteMatch(num_tokens=(end - first_block) * self._layout.block_size)

    def _find(self, block_hashes: Sequence[Sequence[bytes]], first_block: int, end: int) -> dict[int, int]:
        """The slots of the needed blocks, by place (``block_place``), in the order of the prompt."""
        firsts = [
            max(self._groups.first_block(group, end * self._layout.block_size), first_block)
            for group in range(len(block_hashes))
        ]
        return {
            block_place(index, group, len(firsts)): self.slots.slot_of(block_hashes[group][index])
            for index in range(first_block, end)
            for group, first in enumerate(firsts)
            if index >= first and block_hashes[group][index] != NO_ADDRESS
        }

    def begin_load(
        self,
        *,
        request_id: str,
        params: KVTransferParams | None,  # noqa: ARG002
        first_block: int,
        block_ids: GroupBlocks,
    ) -> None:
        """Queue the load of the blocks that ``match`` found."""
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
        self._unpin(rest)
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

    def cancel_load(self, request_id: str) -> None:
        """The request ended while loading; the worker's half ignores ids that it does not load."""
        self._cancelled.append(request_id)

    def keep_evicted(self, block_ids: Sequence[int], block_hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Queue copies of blocks that are not kept yet; returns the hashes that cannot be found here any more."""
        lost, self._lost = self._lost, {}
        stored: list[tuple[int, int, bytes]] = []
        for block_id, block_hash in zip(block_ids, block_hashes, strict=True):
            placed = self._place(block_hash)
            if placed is None:
                self.num_refused_blocks += 1
                lost[block_hash] = None
                continue
            lost.pop(block_hash, None)
            if placed.evicted is not None:
                lost[placed.evicted] = None
            if placed.is_new:
                stored.append((block_id, placed.slot, block_hash))
        if stored:
            self.num_stored_blocks += len(stored)
            ids, slots, hashes = zip(*stored, strict=True)
            self._stores.append(StoreOrder(block_ids=ids, slots=slots, block_hashes=hashes))
        return tuple(lost)

    def keeps(self, block_hash: bytes) -> bool:
        """True when this content can be found here."""
        return block_hash in self.slots

    def forget_evicted(self) -> int:
        """Forget all content. Slots that are being loaded stay pinned until their load ended."""
        self._let_go_of_match()
        num_kept = len(self.slots)
        self._drop(self.slots.clear())
        self._lost.clear()
        return num_kept

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
        """Unpin the slots of loads that were confirmed, or that can no longer be confirmed."""
        for lease in leases:
            self._unpin(self._leased.pop(lease.lease_id, ()))

    def slots_lost(self, lost: Iterable[LostSlot]) -> None:
        """Stop offering content that the storage has lost."""
        for entry in lost:
            if self.slots.forget(entry.slot, entry.block_hash):
                self._lost[entry.block_hash] = None

    def check_integrity(self) -> None:
        """Compare the pins of the slots with the loads and the match that hold them.

        Raises:
            AssertionError: They disagree.
        """
        expected = [0] * self.slots.num_slots
        for slots in (tuple(self._matched.values()), *self._leased.values()):
            for slot in slots:
                expected[slot] += 1
        self.slots.check_integrity(expected)

    def _place(self, block_hash: bytes) -> Placed | None:
        """A slot for content; None when there is no free slot, or the storage cannot take a block now."""
        if block_hash in self.slots:
            return self.slots.place(block_hash)
        if not self.slots.has_room or not self._storage.reserve():
            return None
        return self.slots.place(block_hash)

    def _let_go_of_match(self) -> None:
        self._unpin(tuple(self._matched.values()))
        self._matched = {}

    def _unpin(self, slots: Sequence[int]) -> None:
        self._drop(self.slots.unpin(slots))

    def _drop(self, slots: Sequence[int]) -> None:
        """Queue the removal of content that must not be found again, even after a restart."""
        if slots:
            self._stores.append(StoreOrder(dropped_slots=tuple(slots)))
