"""What a draft model holds of each request: a row, cache blocks, and how far both are valid. Does not import torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.contract.step import IntArray


@dataclass(slots=True, eq=False)
class DraftRow:
    """One request in a draft model's cache.

    block_ids: one list a KV cache group.
    num_known: the request's tokens at the last call, all of them in the row. num_computed: those whose KV is computed.
    drafts: the tokens proposed at the last call; the KV of all but the last is computed.
    """

    row: int
    block_ids: list[list[int]]
    num_known: int = 0
    num_computed: int = 0
    drafts: list[int] = field(default_factory=list)

    def take_in(self, token_ids: IntArray) -> int:
        """Compare the drafts with the tokens that followed. ``token_ids`` are all tokens of the request.

        Returns:
            How many of ``token_ids`` the row already holds; KV computed behind them is void.
        """
        num_right = 0
        for guess, token_id in zip(self.drafts, token_ids[self.num_known :].tolist(), strict=False):
            if guess != token_id:
                break
            num_right += 1
        num_standing = self.num_known + num_right
        if self.drafts:
            self.num_computed = self.num_known + min(num_right, len(self.drafts) - 1)
        # The last token is always computed again, since its successor is sampled from it.
        self.num_computed = min(self.num_computed, token_ids.size - 1)
        self.num_known, self.drafts = int(token_ids.size), []
        return min(num_standing, self.num_known)


class DraftRows:
    """Rows and blocks of a draft model. When either runs out, the least recently used request loses its own.

    A request that lost them is computed anew: what they hold depends on its tokens alone.
    """

    def __init__(self, *, max_num_seqs: int, num_blocks: int, num_groups: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self._num_groups = num_groups
        self._block_size = block_size
        self._rows: OrderedDict[str, DraftRow] = OrderedDict()
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._free_blocks = list(range(num_blocks - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds."""
        return len(self._free_blocks)

    def find(self, request_id: str) -> DraftRow | None:
        """The request's row, which becomes the most recently used; None if it has none."""
        found = self._rows.get(request_id)
        if found is not None:
            self._rows.move_to_end(request_id)
        return found

    def admit(self, request_id: str, *, num_tokens: int, keep: Collection[str]) -> DraftRow | None:
        """A row for a request that has none, with blocks for ``num_tokens`` tokens; None if there is no room.

        Requests in ``keep`` are not evicted.
        """
        while not self._free_rows and self._evict(keep):
            pass
        if not self._free_rows:
            return None
        row = DraftRow(self._free_rows.pop(), [[] for _ in range(self._num_groups)])
        self._rows[request_id] = row
        if self.extend(row, num_tokens=num_tokens, keep={*keep, request_id}) is None:
            self.forget([request_id])
            return None
        return row

    def extend(self, row: DraftRow, *, num_tokens: int, keep: Collection[str]) -> range | None:
        """Give a row blocks for ``num_tokens`` tokens. Returns the new columns; None, with nothing changed, if there is
        no room.
        """
        num_before = len(row.block_ids[0])
        new = range(num_before, max(-(-num_tokens // self._block_size), num_before))
        num_missing = len(new) * self._num_groups
        while len(self._free_blocks) < num_missing and self._evict(keep):
            pass
        if len(self._free_blocks) < num_missing:
            return None
        for block_ids in row.block_ids:
            block_ids.extend(self._free_blocks.pop() for _ in new)
        return new

    def forget(self, request_ids: Sequence[str]) -> None:
        """Free the rows and blocks of these requests; unknown ones are ignored."""
        for request_id in request_ids:
            row = self._rows.pop(request_id, None)
            if row is not None:
                self._free_rows.append(row.row)
                for block_ids in row.block_ids:
                    self._free_blocks.extend(block_ids)

    def _evict(self, keep: Collection[str]) -> bool:
        """Forget the least recently used request that is not in ``keep``; False if there is none."""
        oldest = next((request_id for request_id in self._rows if request_id not in keep), None)
        if oldest is None:
            return False
        self.forget([oldest])
        return True

    def check_integrity(self) -> None:
        """Check that every block and row is either held once or free.

        Raises:
            AssertionError: A block or a row is held twice, or lost.
        """
        held = [block for row in self._rows.values() for block_ids in row.block_ids for block in block_ids]
        assert sorted([*held, *self._free_blocks]) == list(range(self.num_blocks)), "blocks are held twice, or lost"
        rows = [row.row for row in self._rows.values()]
        assert len({*rows, *self._free_rows}) == len(rows) + len(self._free_rows), "a row is held twice"


def table_of(row: DraftRow) -> IntArray:
    """A row's block tables, [num_groups, num_blocks]."""
    return np.array(row.block_ids, np.int32)
