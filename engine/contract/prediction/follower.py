"""Where an answer stands in the text that its caller predicted. Free of torch.

Workers draft tokens by it, and routers tell by it what came true of a prediction: so usage is the same wherever an
answer was made, and however many steps it took.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from engine.contract.token_ids import TokenIds

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]

MAX_TAIL: Final = 8
"""Of the last tokens of an answer so many are looked for, once it has left the prediction."""

NEAR: Final = 8
"""So far behind the place where an answer left the prediction, one token is enough to find it again."""

LEAST_MATCH: Final = 3
"""Anywhere else it takes so many: fewer stand everywhere."""


class PredictionFollower:
    """Follows one answer along its prediction, token by token.

    An answer that says something else has left the prediction at a place. From then on its last tokens are looked for:
    near behind that place one of them is enough, so that a token that was replaced or some that were left out cost
    little; everywhere in the prediction the longest run of at least ``LEAST_MATCH`` counts.

    num_tokens: of the answer, so far. num_followed: so many of them in a row were as predicted, up to the last one.
    num_accepted: tokens of the prediction that the answer said.
    """

    def __init__(self, token_ids: TokenIds) -> None:
        self._predicted = token_ids.array
        self._came_true = bytearray(len(token_ids))
        self._tail: list[int] = []
        self._place = 0
        self._is_lost = False
        self.num_tokens = 0
        self.num_followed = 0
        self.num_accepted = 0

    @property
    def num_rejected(self) -> int:
        """Tokens of the prediction that the answer did not say, so far."""
        return len(self._came_true) - self.num_accepted

    def expected(self, max_tokens: int) -> IntArray:
        """At most so many tokens that should come next; none while the answer is somewhere else."""
        return self._predicted[self._place : self._place + max_tokens] if not self._is_lost else self._predicted[:0]

    def follow(self, token_ids: Sequence[int]) -> None:
        """Take in the answer's next tokens."""
        self.num_tokens += len(token_ids)
        for token_id in token_ids:
            self._tail = [*self._tail[1 - MAX_TAIL :], token_id]
            if not self._is_lost and self._place < self._predicted.size and self._predicted[self._place] == token_id:
                self._accept(self._place)
            else:
                self._look_for(token_id)

    def _accept(self, index: int) -> None:
        """The answer said this token of the prediction, and stands behind it."""
        self.num_accepted += not self._came_true[index]
        self._came_true[index] = 1
        self._place = index + 1
        self.num_followed += 1

    def _look_for(self, token_id: int) -> None:
        """Go to where the answer is now, if the prediction says that anywhere."""
        self.num_followed = 0
        found = self._find(np.flatnonzero(self._predicted == token_id))
        self._is_lost = found is None
        if found is not None:
            self._accept(found)

    def _find(self, places: LongArray) -> int | None:
        """The best of the places where the answer's last token stands."""
        near = places[(places >= self._place) & (places < self._place + NEAR)]
        length = min(places.size, 1)
        while 0 < length < len(self._tail):
            longer = places[places >= length]
            longer = longer[self._predicted[longer - length] == self._tail[-1 - length]]
            if longer.size == 0:
                break
            places, length = longer, length + 1
        if length >= LEAST_MATCH:
            ahead = places[places >= self._place]
            return int(ahead[0]) if ahead.size else int(places[-1])
        return int(near[0]) if near.size else None
