"""The prefill side of the streamed hand-over: which prompts are handed over in chunks, and how far each is computed."""

from __future__ import annotations

from engine.contract.step import IntArray
from engine.scheduler.requests.request import Request
from engine.scheduler.requests.row_table import RowArray, RowTable
from kv_transfer.cache_groups import ABSENT_BLOCK, GroupBlocks
from kv_transfer.protocols import KVProducer


class Announcer:
    """Announces the full blocks of such prompts as steps return, and withdraws prompts that are given up.

    In a group with a window, only the blocks that the window still holds at the end of the prompt are announced. The
    reader needs no others, and they may be given back earlier.

    A prompt that is computed in one step is never followed: nothing of it could be read early.
    """

    def __init__(self, producer: KVProducer | None, *, table: RowTable) -> None:
        self._producer = producer if producer is not None and producer.can_stream else None
        self._table = table
        self.num_announced: dict[int, int] = {}
        """How many blocks were announced of each prompt that is followed, by its row. To be read only."""

    def started(self, request: Request, *, is_complete: bool) -> None:
        """Follow a request that got a row and its first tokens; not if these are all (``is_complete``)."""
        if self._producer is not None and request.message.hand_over and not is_complete:
            assert request.row is not None
            self.num_announced[request.row] = 0

    def step_returned(self, rows: RowArray, ends: IntArray) -> None:
        """Announce newly full blocks of unfinished prompts: KV before ``ends[i]`` of ``rows[i]`` is in the cache."""
        for row, end in zip(rows.tolist(), ends.tolist(), strict=True):
            num_announced = self.num_announced.get(row)
            if num_announced is None:
                continue
            request = self._table.owner(row)
            num_blocks = min(end, request.num_prompt_tokens) // self._table.block_size
            if num_blocks > num_announced:
                assert self._producer is not None
                block_ids = self._needed_blocks(row, num_announced, num_blocks, request.num_prompt_tokens)
                self._producer.announce(request_id=request.request_id, first_block=num_announced, block_ids=block_ids)
                self.num_announced[row] = num_blocks

    def _needed_blocks(self, row: int, start: int, end: int, num_prompt_tokens: int) -> GroupBlocks:
        block_ids: list[tuple[int, ...]] = []
        for group, table in enumerate(self._table.block_table):
            first = min(max(self._table.groups.first_block(group, num_prompt_tokens - 1), start), end)
            block_ids.append((ABSENT_BLOCK,) * (first - start) + tuple(table[row, first:end].tolist()))
        return tuple(block_ids)

    def finish(self, request: Request) -> None:
        """Stop following a complete prompt; its lease covers what was announced."""
        if request.row is not None:
            self.num_announced.pop(request.row, None)

    def give_up(self, request: Request) -> None:
        """Withdraw the announcements of a request that loses its row and its blocks."""
        if request.row is not None and self.num_announced.pop(request.row, 0):
            assert self._producer is not None
            self._producer.withdraw(request.request_id)
