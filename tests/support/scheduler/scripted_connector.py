"""The scheduler's half of a connector under a test's control: loads and leases end when the test says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from kv_transfer.cache_groups import ABSENT_BLOCK, CacheGroups, GroupBlocks, first_held_block, held_blocks
from kv_transfer.connector import ConnectorOrders, LoadOrder, SchedulerConnector
from kv_transfer.params import PROTOCOL_VERSION, KVStreamParams, KVTransferParams, PeerIdentity
from kv_transfer.protocols import RemoteMatch

PEER = PeerIdentity(engine_id="peer", incarnation="1")


@dataclass(slots=True)
class OpenLoad:
    """A load that has not ended. ``token_ids`` are the tokens of its content, as the test knows them; ``tables`` are by
    group.
    """

    request_id: str
    params: KVTransferParams
    first_block: int
    tables: GroupBlocks
    token_ids: tuple[int, ...] = ()
    is_cancelled: bool = False
    stream_id: str | None = None

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The blocks that it writes, in the order of the prompt."""
        return tuple(held_blocks(self.tables))


@dataclass(slots=True)
class OpenStream:
    """A stream that no load has taken over. ``is_reading``: a read is in flight, so that it cannot end immediately."""

    request_id: str
    params: KVStreamParams
    first_block: int
    tables: GroupBlocks
    is_reading: bool = False
    is_cancelled: bool = False

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The blocks that it writes, in the order of the prompt."""
        return tuple(held_blocks(self.tables))


@dataclass(slots=True)
class OpenLease:
    """A lease that has not ended. ``tables`` hold, by group, the last of the blocks of its tokens."""

    request_id: str
    tables: GroupBlocks
    num_tokens: int


class ScriptedConnector:
    """Implements ``KVSource``, ``KVProducer`` and ``KVConsumer``. ``offers``: the tokens of hand-overs, by lease id."""

    def __init__(self, *, block_size: int, windows: Sequence[int | None] = (None,)) -> None:
        self.groups = CacheGroups(tuple(windows), block_size)
        self.offers: dict[str, tuple[int, ...]] = {}
        self.undecided: set[str] = set()
        self.expected: set[str] = set()
        self.open_loads: dict[str, OpenLoad] = {}
        self.open_streams: dict[str, OpenStream] = {}
        self.announced: dict[str, list[list[int]]] = {}
        self.withdrawn: list[str] = []
        self.can_stream = True
        self.open_leases: dict[str, OpenLease] = {}
        self.released: list[str] = []
        self.passed_on: list[str] = []
        self.cancelled: list[str] = []
        self.aborted_leases: list[str] = []
        self.num_matches = 0
        self._block_size = block_size
        self._lease_ids = count()
        self._orders: list[LoadOrder] = []
        self._releases: list[KVTransferParams] = []
        self._cancels: list[str] = []

    def offer(self, token_ids: tuple[int, ...], *, is_known: bool = True) -> KVTransferParams:
        """A hand-over of these tokens' KV; without ``is_known`` the connector cannot tell yet how much it has."""
        lease_id = f"peer-{next(self._lease_ids)}"
        self.offers[lease_id] = token_ids
        if not is_known:
            self.undecided.add(lease_id)
        end = self.groups.num_blocks_for(len(token_ids))
        firsts = [self.groups.first_block(group, len(token_ids) - 1) for group in range(self.groups.num_groups)]
        return self._params(lease_id, tuple(tuple(range(first, end)) for first in firsts), len(token_ids))

    def expect(self, params: KVTransferParams) -> None:
        """Note that a hand-over's request waits here."""
        assert params.lease_id in self.offers
        self.expected.add(params.lease_id)

    def pass_on(self, params: KVTransferParams) -> None:
        """Note that a request with a hand-over continues elsewhere; only once."""
        self.expected.remove(params.lease_id)
        del self.offers[params.lease_id]
        self.passed_on.append(params.lease_id)

    def match(
        self,
        *,
        request_id: str,
        params: KVTransferParams | None,
        num_prompt_tokens: int,
        num_local_tokens: int,
        block_hashes: Sequence[Sequence[bytes]] = (),
    ) -> RemoteMatch | None:
        """Offer all of the hand-over beyond the local prefix."""
        if params is None:
            return RemoteMatch(num_tokens=0)
        self.num_matches += 1
        if params.lease_id in self.undecided:
            return None
        num_blocks, num_local_blocks = (
            self.groups.num_blocks_for(params.num_tokens),
            num_local_tokens // self._block_size,
        )
        for group, block_ids in enumerate(params.block_ids):
            first = self.groups.first_block(group, min(params.num_tokens, num_prompt_tokens - 1))
            if num_blocks - len(block_ids) > max(first, num_local_blocks):
                return RemoteMatch(num_tokens=0)
        return RemoteMatch(num_tokens=max(params.num_tokens - num_local_tokens, 0))

    @property
    def questions(self) -> SchedulerConnector:
        """This connector as the implementation of all Protocols."""
        return SchedulerConnector(source=self, producer=self, consumer=self, take_orders=self.take_orders)

    def begin_load(
        self, *, request_id: str, params: KVTransferParams | None, first_block: int, block_ids: tuple[int, ...]
    ) -> None:
        """Open a load."""
        assert params is not None, "nothing but hand-overs is offered"
        self._open_load(request_id, params, first_block, block_ids)

    def load_streamed(
        self,
        *,
        stream_id: str,
        request_id: str,
        params: KVTransferParams,
        first_block: int,
        block_ids: GroupBlocks,
    ) -> None:
        """Open a load that takes over a stream with the same destination."""
        stream = self.open_streams.pop(stream_id)
        assert not stream.is_cancelled
        assert stream.request_id == request_id
        assert stream.first_block == first_block
        assert tuple(table[: len(block_ids[0])] for table in stream.tables) == block_ids
        self._open_load(request_id, params, first_block, block_ids, stream_id)

    def _open_load(
        self,
        request_id: str,
        params: KVTransferParams,
        first_block: int,
        block_ids: GroupBlocks,
        stream_id: str | None = None,
    ) -> None:
        assert request_id not in self.open_loads, "one load a request"
        assert params.lease_id in self.offers, "a hand-over is used once"
        assert params.lease_id in self.expected, "a hand-over is kept alive while its request waits"
        assert held_blocks(block_ids), "nothing to load"
        end_block, num_blocks = first_block + len(block_ids[0]), self.groups.num_blocks_for(params.num_tokens)
        assert end_block <= num_blocks
        for wanted, lent in zip(block_ids, params.block_ids, strict=True):
            assert len(wanted) == len(block_ids[0]), "equally many of each group"
            assert len(wanted) - first_held_block(wanted) <= end_block - (num_blocks - len(lent)), "not lent"
        token_ids = self.offers.pop(params.lease_id)
        self.open_loads[request_id] = OpenLoad(
            request_id, params, first_block, block_ids, token_ids, stream_id=stream_id
        )
        flat = tuple(held_blocks(block_ids))
        self._orders.append(LoadOrder(request_id=request_id, params=params, source_block_ids=flat, block_ids=flat))

    def begin_stream(
        self, *, stream_id: str, request_id: str, params: KVStreamParams, first_block: int, block_ids: GroupBlocks
    ) -> bool:
        """Open a stream."""
        assert stream_id not in self.open_streams
        if self.can_stream:
            self.open_streams[stream_id] = OpenStream(request_id, params, first_block, block_ids)
        return self.can_stream

    def cancel_stream(self, stream_id: str) -> bool:
        """Close a stream, immediately unless a read is in flight."""
        stream = self.open_streams[stream_id]
        assert not stream.is_cancelled
        stream.is_cancelled = True
        if not stream.is_reading:
            del self.open_streams[stream_id]
        return not stream.is_reading

    def announce(self, *, request_id: str, first_block: int, block_ids: GroupBlocks) -> None:
        """Note what is announced; in order."""
        tables = self.announced.setdefault(request_id, [[] for _ in block_ids])
        for table, more in zip(tables, block_ids, strict=True):
            assert first_block == len(table)
            assert more
            table.extend(more)

    def withdraw(self, request_id: str) -> None:
        """Note that announced blocks are given up."""
        del self.announced[request_id]
        self.withdrawn.append(request_id)

    def cancel_load(self, request_id: str) -> None:
        """Note that a load is cancelled; loads of other sources are ignored."""
        if request_id in self.open_loads:
            self.open_loads[request_id].is_cancelled = True
            self._cancels.append(request_id)

    def release(self, params: KVTransferParams) -> None:
        """Note that a hand-over will not be read; only once."""
        del self.offers[params.lease_id]
        self.undecided.discard(params.lease_id)
        self.released.append(params.lease_id)
        self._releases.append(params)

    def grant_lease(self, *, request_id: str, block_ids: GroupBlocks, num_tokens: int) -> KVTransferParams:
        """Open a lease."""
        lease_id = f"own-{next(self._lease_ids)}"
        announced = self.announced.pop(request_id, [[] for _ in block_ids])
        end = self.groups.num_blocks_for(num_tokens)
        for group, (lent, told) in enumerate(zip(block_ids, announced, strict=True)):
            first = self.groups.first_block(group, num_tokens - 1)
            assert len(lent) == end - first, "the blocks cover what the last token sees"
            assert told[:first] == [ABSENT_BLOCK] * len(told[:first]), "announced, but not handed over"
            # Nothing before the window of a whole prompt is announced; drained before its end, it is handed over.
            pairs = zip(lent, told[first:], strict=False)
            assert all(ours in (theirs, ABSENT_BLOCK) for theirs, ours in pairs), "what was announced is handed over"
        self.open_leases[lease_id] = OpenLease(request_id, block_ids, num_tokens)
        return self._params(lease_id, block_ids, num_tokens)

    def abort_lease(self, request_id: str) -> None:
        """Note that a lease should end."""
        self.aborted_leases.append(request_id)

    def take_orders(self) -> ConnectorOrders:
        """Hand over what was queued."""
        orders = ConnectorOrders(
            loads=tuple(self._orders), cancelled_loads=tuple(self._cancels), releases=tuple(self._releases)
        )
        self._orders, self._cancels, self._releases = [], [], []
        return orders

    def take_in(self, orders: ConnectorOrders) -> None:
        """The worker's side of a step: remember the actual orders."""
        self.cancelled.extend(orders.cancelled_loads)

    def _params(self, lease_id: str, block_ids: GroupBlocks, num_tokens: int) -> KVTransferParams:
        return KVTransferParams(
            protocol_version=PROTOCOL_VERSION,
            source=PEER,
            lease_id=lease_id,
            layout_hash="layout",
            block_ids=block_ids,
            num_tokens=num_tokens,
        )
