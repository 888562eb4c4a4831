"""The beams of one running request: what each row returned, and how the rows go on. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.contract.messages import SamplingParams
from engine.scheduler.beams.search import BeamSearch


class NextBeam(NamedTuple):
    """A beam that goes on: ``parent_row`` has computed everything before its new tokens."""

    parent_row: int
    token_ids: tuple[int, ...]


class BeamGroup:
    """A request's beam search, and the rows of its running outputs.

    ``rows`` belong to ``search.running``, in the same order; empty before the first choice, while one row computes the
    prompt. ``next_beams`` were chosen and wait for rows and blocks; None when none wait. A request that loses its rows
    keeps its search: when its prompt is computed again, its beams go on with the tokens that they have.
    """

    def __init__(self, sampling: SamplingParams, *, max_tokens: int) -> None:
        assert sampling.beams is not None
        self.search = BeamSearch(
            sampling.beams, stop_ids=sampling.all_stop_ids, min_tokens=sampling.min_tokens, max_tokens=max_tokens
        )
        self.rows: tuple[int, ...] = ()
        self.next_beams: tuple[NextBeam, ...] | None = None
        self._arrived: dict[int, tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]] = {}

    def take_in(self, row: int, token_ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]) -> bool:
        """Take in a row's candidates; True when all rows have returned theirs, and ``choose`` is due."""
        self._arrived[row] = (token_ids, logprobs)
        return len(self._arrived) == max(len(self.rows), 1)

    def choose(self) -> None:
        """Advance the search. Unless it is over, ``next_beams`` holds the beams that it chose.

        After a prompt was computed again, the beams are the ones that ran before.
        """
        rows: Sequence[int] = self.rows or tuple(self._arrived)
        search, arrived = self.search, self._arrived
        self._arrived = {}
        if not self.rows and search.num_tokens:
            (row,) = rows
            self.next_beams = tuple(NextBeam(row, beam.token_ids) for beam in search.running)
            return
        candidates = [arrived[row] for row in rows]
        parents = search.advance([ids for ids, _ in candidates], [values for _, values in candidates])
        self.next_beams = tuple(
            NextBeam(rows[parent], beam.token_ids[-1:]) for parent, beam in zip(parents, search.running, strict=True)
        )

    def give_up_rows(self) -> None:
        """Drop the request's rows, and what they returned since the last choice."""
        self.rows, self.next_beams = (), None
        self._arrived = {}
