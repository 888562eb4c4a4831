"""The beams of one request that runs: what each row brought, and how the rows are to go on. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.contract.messages import SamplingParams
from engine.scheduler.beams.search import BeamSearch


class NextBeam(NamedTuple):
    """A beam that goes on: the row that has computed all before its new tokens."""

    parent_row: int
    token_ids: tuple[int, ...]


class BeamGroup:
    """A request's search, and the rows of its running outputs.

    ``rows`` are those of ``search.running``, in its order; before the first choice, while one row computes the prompt,
    there are none. ``next_beams`` is what was chosen and waits for rows and blocks; None while nothing does. A request
    that loses its rows keeps its search: when its prompt is computed again, its beams go on with the tokens they have.
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
        """Take what a row brought; True when all rows have brought theirs, and ``choose`` is due."""
        self._arrived[row] = (token_ids, logprobs)
        return len(self._arrived) == max(len(self.rows), 1)

    def choose(self) -> None:
        """Let the search go on; unless it is over then, ``next_beams`` is what it chose.

        Behind a prompt that was computed again these are the beams that there were.
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
        """The request loses its rows, and what they brought since the last choice."""
        self.rows, self.next_beams = (), None
        self._arrived = {}
