"""The decode side of the streamed hand-over: loads that begin before their prompt is computed. Free of torch.

Early loads have the lowest priority. One is begun only when no other request waits. It holds all blocks that its
request will need, and gives them back, newest first, as soon as any other request lacks one. So nothing ever waits for
a prefill that may itself be waiting (known-failures 7). Nothing that it read counts until its request has come with a
lease and taken it over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from engine.contract.errors import RequestRefusedError
from engine.scheduler.blocks.block_need import BlockNeed
from engine.scheduler.blocks.kv_cache_manager import KVCacheManager
from engine.scheduler.requests.request import Request
from kv_transfer.cache_groups import BlockTables, CacheGroups, has_window, held_blocks
from kv_transfer.params import KVStreamParams
from kv_transfer.protocols import KVConsumer


@dataclass(slots=True, kw_only=True, eq=False)
class EarlyLoad:
    """An announced request, and the blocks held for it. ``block_tables`` are empty until the load begins."""

    request: Request
    params: KVStreamParams
    stream_id: str
    deadline_s: float
    block_tables: BlockTables = field(default_factory=list)
    num_local_blocks: int = 0

    @property
    def num_blocks(self) -> int:
        """Length of its block tables: the number of blocks in a group that leaves none out."""
        return max(map(len, self.block_tables), default=0)

    def has_from(self, groups: CacheGroups, position: int) -> bool:
        """True when its tables hold every block that ``position`` sees."""
        return has_window(groups, self.block_tables, position)


class EarlyLoads:
    """Early loads by the id of their request, oldest first; each ends by a takeover, a drop, or its deadline.

    If a dropped early load has a read under way, its blocks stay held until that read ends.
    """

    def __init__(
        self,
        consumer: KVConsumer | None,
        *,
        kv_cache: KVCacheManager,
        max_num: int,
        clock: Callable[[], float],
    ) -> None:
        self._consumer = consumer
        self._kv_cache = kv_cache
        self._max_num = max_num
        self._clock = clock
        self.by_request: dict[str, EarlyLoad] = {}
        """To be read only."""
        self._ending: dict[str, BlockTables] = {}
        self._num_added = 0
        self.num_dropped = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that dropping early loads would free at once: those that no read may still write."""
        return sum(len(held_blocks(early.block_tables)) for early in self.by_request.values())

    @property
    def has_ending(self) -> bool:
        """True while a read may still write the blocks of a dropped early load; they are freed when it ends."""
        return bool(self._ending)

    @property
    def next_deadline_s(self) -> float | None:
        """The earliest deadline; None when there are no early loads."""
        return min((early.deadline_s for early in self.by_request.values()), default=None)

    def tables(self) -> list[list[int]]:
        """The blocks held for early loads, by request."""
        tables = [early.block_tables for early in self.by_request.values()] + list(self._ending.values())
        return [held_blocks(table) for table in tables]

    def add(self, request: Request, params: KVStreamParams) -> None:
        """Take in the announcement of a request; it replaces an older announcement of the same request.

        Raises:
            RequestRefusedError: This engine cannot stream, or has its maximum of early loads.
        """
        self.drop(request.request_id)
        if self._consumer is None or not self._consumer.can_stream:
            raise RequestRefusedError("this engine does not read KV while prompts are computed", code="cannot_stream")
        if len(self.by_request) >= self._max_num:
            raise RequestRefusedError(f"{self._max_num} requests are announced already", code="queue_full")
        self._num_added += 1
        self.by_request[request.request_id] = EarlyLoad(
            request=request,
            params=params,
            stream_id=f"{request.request_id}#{self._num_added}",
            deadline_s=self._clock() + params.timeout_s,
        )

    def pending(self) -> Iterator[EarlyLoad]:
        """Early loads that have not begun, oldest first."""
        return iter([early for early in self.by_request.values() if not early.block_tables])

    def begin(self, early: EarlyLoad, need: BlockNeed, *, num_local_blocks: int) -> None:
        """Hold the blocks that the request will need, its local prefix included, and read as its prompt is computed."""
        assert self._consumer is not None
        early.block_tables = self._kv_cache.take(need)
        early.num_local_blocks = num_local_blocks
        prompt_end = self._kv_cache.num_blocks_for(early.request.num_prompt_tokens)
        was_begun = self._consumer.begin_stream(
            stream_id=early.stream_id,
            request_id=early.request.request_id,
            params=early.params,
            first_block=num_local_blocks,
            block_ids=tuple(tuple(table[num_local_blocks:prompt_end]) for table in early.block_tables),
        )
        if not was_begun:
            self._kv_cache.release_tables(early.block_tables)
            del self.by_request[early.request.request_id]

    def find(self, request: Request) -> EarlyLoad | None:
        """The early load whose blocks ``request`` can take over as they are; one that does not fit is dropped."""
        early = self.by_request.get(request.request_id)
        if early is None:
            return None
        ours, theirs = early.request.message, request.message
        fits = (
            request.kv_transfer is not None
            and request.kv_transfer.source == early.params.source
            and early.num_blocks == self._kv_cache.num_blocks_for(request.num_tokens)
            and early.has_from(self._kv_cache.groups, min(request.kv_transfer.num_tokens, request.num_tokens - 1))
            and (ours.prompt_token_ids, ours.cache_salt) == (theirs.prompt_token_ids, theirs.cache_salt)
        )
        if not fits:
            self.drop(request.request_id)
            return None
        return early

    def take(self, early: EarlyLoad) -> None:
        """Give the blocks and the stream to the request."""
        del self.by_request[early.request.request_id]

    def drop(self, request_id: str) -> bool:
        """End an early load; False when there is none."""
        early = self.by_request.pop(request_id, None)
        if early is None:
            return False
        if early.block_tables:
            self.num_dropped += 1
            assert self._consumer is not None
            if self._consumer.cancel_stream(early.stream_id):
                self._kv_cache.release_tables(early.block_tables)
            else:
                self._ending[early.stream_id] = early.block_tables
        return True

    def drop_newest(self) -> bool:
        """End the newest early load that holds blocks, because a request lacks them; False when there is none."""
        for request_id in reversed(self.by_request):
            if self.by_request[request_id].block_tables:
                return self.drop(request_id)
        return False

    def drop_client(self, client_id: str) -> None:
        """End the early loads of a front end that is gone."""
        for request_id in [key for key, early in self.by_request.items() if early.request.client_id == client_id]:
            self.drop(request_id)

    def drop_all(self) -> None:
        """End all early loads."""
        for request_id in tuple(self.by_request):
            self.drop(request_id)

    def expire(self) -> None:
        """End early loads whose request did not come in time."""
        if not self.by_request:
            return
        now_s = self._clock()
        for request_id in [key for key, early in self.by_request.items() if early.deadline_s <= now_s]:
            self.drop(request_id)

    def end(self, stream_id: str) -> bool:
        """Free the blocks of a dropped early load whose read ended; False for unknown streams and ended ones."""
        tables = self._ending.pop(stream_id, None)
        if tables is None:
            return False
        self._kv_cache.release_tables(tables)
        return True
